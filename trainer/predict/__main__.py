"""One prediction worker as a process: `python -m trainer.predict --config FILE`, started by service.predicting.

FILE is a PredictWorker as JSON. The process leads a process group of its own and ends with who started it.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from millrace import lifecycle, logs
from millrace.config import validate
from trainer.predict.config import PredictWorker
from trainer.predict.worker import run


def start(path: Path) -> None:
    """Read the configuration and run."""
    config = validate(PredictWorker, json.loads(path.read_text(encoding="utf-8")))
    logs.setup(f"predictor-{config.rank}")
    if os.getpgrp() == os.getpid():  # a launcher started us; in a shell, standard input is a person's
        lifecycle.end_with_parent()
    run(config)


def main() -> None:
    """See module docstring."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--config", type=Path, required=True)
    path = arguments.parse_args().config
    sys.exit(lifecycle.exit_code_of(lambda: start(path)))


if __name__ == "__main__":
    main()
