"""Looks inside exports and commits, and compares them."""
