"""When pushes count, whom a rank waits for, and what a close promises: the modes of consistency."""
