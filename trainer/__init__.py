"""Training: passes, steps, dense parts, models, metrics."""
