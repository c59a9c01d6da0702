"""The HTTP API, /v1: the state of jobs and the actions on them, for users, programs and Prometheus."""
