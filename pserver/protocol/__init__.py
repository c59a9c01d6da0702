"""The calls of a shard: their protocol, messages, placement of keys, and table operations."""
