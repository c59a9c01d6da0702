"""Jobs that outlive the service: each has a launcher of its own, which a restarted service finds again."""
