"""Prediction jobs: their workers, their output, and the commands for them."""
