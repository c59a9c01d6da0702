"""The parts of rank 0: planner, replay log, operations, recovery. Imports no torch."""
