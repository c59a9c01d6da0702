"""Launchers: they start the workers of a job, supervise them, restart them after a death, and end them together."""
