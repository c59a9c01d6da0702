"""Sums and messages between the ranks, in a fixed order."""
