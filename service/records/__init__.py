"""The database of the service: jobs, operations, tokens and the audit log."""
