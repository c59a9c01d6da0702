"""Inspects and compares exports and commits, and imports another model."""
