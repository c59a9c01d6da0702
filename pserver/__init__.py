"""Parameter server: tables of embedding rows, on shards of their own or inside a trainer. Never imports torch."""
