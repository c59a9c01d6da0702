"""Proposals of job files, made from a sample of events."""
