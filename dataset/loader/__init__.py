"""Reads segments ahead of training and cuts their samples into batches."""
