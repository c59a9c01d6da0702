"""The HTTP API: what a job is doing, for people and for Prometheus."""
