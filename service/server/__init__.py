"""`headrace serve`: jobs, access, API and live page put together."""
