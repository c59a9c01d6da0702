"""A client of the REST API of a service."""
