"""Millrace's shared kernel: what every role needs and no role owns."""

__version__ = "0.1.0"
