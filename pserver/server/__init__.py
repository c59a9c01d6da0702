"""One shard: its calls, its passes, embedded or as a server."""
