"""A job's exports: what is there, which is pointed to, one more."""
