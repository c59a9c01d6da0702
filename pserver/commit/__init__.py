"""A shard's part of commits, and the files of changed keys."""
