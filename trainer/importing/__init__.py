"""Warm starts: the first state of a job made of an export, a Paddle text save or a Parquet file."""
