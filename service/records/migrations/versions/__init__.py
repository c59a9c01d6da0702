"""One module a change of the tables, in the order of their numbers."""
