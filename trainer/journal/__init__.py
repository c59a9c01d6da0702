"""The job's log: records, files, history, the cut of passes. Imports no torch."""
