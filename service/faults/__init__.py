"""Fault runs: a job runs repeatedly while its workers are killed, and must give the results of an undisturbed run."""
