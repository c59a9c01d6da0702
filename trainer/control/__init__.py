"""The names that the control plane may use of the trainer, by topic. Nothing here loads torch."""
