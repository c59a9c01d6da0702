"""Runs several settings of a job over one reading of its stream, and compares them."""
