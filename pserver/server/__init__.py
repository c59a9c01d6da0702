"""One shard: its calls, its passes, embedded or behind gRPC."""
