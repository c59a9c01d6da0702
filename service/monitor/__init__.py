"""The status of a job for people: alarms, lines, live display."""
