"""The mirror: a copy of commits and log in an object store, from which a job restarts on an empty machine."""
