"""Rows in memory: index, floats, optimizers, row cache."""
