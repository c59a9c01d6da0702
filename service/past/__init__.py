"""A job's history: reading its log and commits, and rewind, skip and rerun."""
