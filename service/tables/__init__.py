"""The rows of a job: what is known of a key, shrinks, deletions, days."""
