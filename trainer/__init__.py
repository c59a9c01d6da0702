"""Training: passes, steps, dense parts, models, metrics."""

import os

# Before torch loads its thread library: threads that wait would spin on the cores that loading and rows need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
