"""Parameter server: tables of embedding rows, in shard processes or inside a trainer. Never imports torch."""
