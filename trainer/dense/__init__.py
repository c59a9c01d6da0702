"""Dense parameters: the strategy by which gradients of all ranks become parameters."""
