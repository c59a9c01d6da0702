"""Launchers: what starts a job's workers, keeps them together, and ends them together."""
