"""The history of a job: log, closes, commits, reruns, rewinds; what commits and exports contain."""
