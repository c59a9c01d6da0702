"""The fence: one sequence of small objects that decides which claims, commits and records of a job count."""
