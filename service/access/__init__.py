"""Who may do what: tokens and roles, the guard of the routes, and what specs may name."""
