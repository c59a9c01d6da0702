"""A replica: holds a job's newest version in memory, from its exports or its live feed, and answers predictions."""
