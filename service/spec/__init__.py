"""The job file: its sections put together, checked against each other."""
