"""A job's past, for people: reading its log and commits, and the few ways to steer by them."""
