"""The process of a command: `headrace`, or `python -m headrace.service` for checkouts that are not installed."""

import sys

import headrace


def run() -> None:
    """Run the command line, then end the process. Returns only for the version."""
    if sys.argv[1:] in (["version"], ["--version"]):  # asked by scripts, often: no command is loaded for it
        print(headrace.__version__)
        return
    from headrace.lifecycle import run_to_end
    from headrace.service.cli.main import main

    run_to_end(main)


if __name__ == "__main__":
    run()
