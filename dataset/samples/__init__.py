"""Samples, batches, and the rejection of bad ones."""
