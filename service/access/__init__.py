"""Authentication and authorization: tokens, roles, the guard of the routes, and what job specs may name."""
