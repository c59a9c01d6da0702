"""Training: the loop of a pass, the step, the close, and the assembly of a trainer."""
