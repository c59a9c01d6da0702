"""Prediction jobs: their workers started and watched, their output completed."""
