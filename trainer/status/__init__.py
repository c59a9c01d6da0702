"""Progress of a trainer for people: rates, time spent, stalls, freshness."""
