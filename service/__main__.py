"""The process of a command: `headrace`, or `python -m headrace.service` for checkouts that are not installed."""

from headrace.lifecycle import run_to_end
from headrace.service.cli.main import main


def run() -> None:
    """Run the command line, then end the process. Does not return."""
    run_to_end(main)


if __name__ == "__main__":
    run()
