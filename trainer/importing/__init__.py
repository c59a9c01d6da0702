"""Warm starts: the first state of a job is made from an export, a Paddle text save or a Parquet file."""
