"""Committed rows beyond memory: one protocol, RocksDB behind it, and a twin in memory."""
