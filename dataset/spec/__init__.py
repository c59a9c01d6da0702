"""The sections of a job file about the stream: sources, pipe, slots, and path patterns."""
