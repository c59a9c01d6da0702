"""The command line: it reads arguments and prints results."""
