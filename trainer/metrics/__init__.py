"""Progressive metrics: measured before a sample is learnt, in integers, the same for any number of ranks."""
