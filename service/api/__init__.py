"""The HTTP API, /v1: what jobs are doing, and what is done to them, for people, programs and Prometheus."""
