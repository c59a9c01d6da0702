"""Models: one file each, one registry."""
