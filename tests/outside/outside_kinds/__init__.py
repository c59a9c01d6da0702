"""Additions to Headrace, one module each."""
