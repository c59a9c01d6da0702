"""Jobs that outlive a command: each with a launcher of its own, which the service finds again."""
