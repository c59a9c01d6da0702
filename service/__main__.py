"""`python -m service`: the command line, for checkouts that are not installed."""

from service.cli.main import main

if __name__ == "__main__":
    main()
