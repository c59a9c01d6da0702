"""Fault runs: a job is run again and again while its workers are killed, and must come out as if nothing had been."""
