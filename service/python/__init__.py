"""The Python API, as users import it from headrace: jobs, a client of a service, exports, replicas."""
