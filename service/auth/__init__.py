"""Who may do what: tokens, roles, allow-lists, limits, exposure."""
