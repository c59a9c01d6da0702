"""Tools that look inside exports and commits, and the warm start."""
