"""Exports of a job: lists, requests, imports from them, and the search for a key."""
