"""Before a job runs for good: a first job file from a sample of events, its size, a sweep over its settings."""
