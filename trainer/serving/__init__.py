"""Rows and items in memory, as replicas and exports read them. Imports no torch."""
