"""Identity of the processes of a job on several machines: its authority, certificates, join token."""

FOLDER = "identity"
"""Folder in a store: key and certificate of the job's authority, and the join token."""
