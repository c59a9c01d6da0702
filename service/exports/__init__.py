"""A job's exports: list them, show one, make one, choose the one that current.json names."""
