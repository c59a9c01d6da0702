"""Samples out of events by the job file alone: no program between the stream and the trainer."""
