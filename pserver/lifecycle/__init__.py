"""The life of rows: ageing, deletions, tombstones."""
