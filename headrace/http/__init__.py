"""HTTP servers: listening sockets, checks of every request, TLS."""
