"""The files of a store by which a client finds the running job; headrace.rpc.job_client reads them."""

LOCK = "lock"
"""File in a store. A launcher holds a lock on it while it runs the store's job."""
WORKERS = "workers"
"""Folder in a store: a folder per generation, with its private files."""
RANK0 = "rank0.json"
"""File in the folder of a generation: address and secret of rank 0, once it serves, and its name off loopback."""
