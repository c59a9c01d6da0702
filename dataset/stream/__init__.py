"""The protocol of a source: partitions, positions, segments, and its errors."""
