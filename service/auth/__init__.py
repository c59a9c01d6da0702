"""Authorization: tokens, roles, allow-lists, limits, exposure."""
