"""Prediction jobs: rows of one fixed version, events in, Parquet out. See README.md."""
