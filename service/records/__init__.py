"""What the service remembers: its jobs, operations, tokens, and who did what."""
