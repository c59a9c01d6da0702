"""The process of a prediction worker: `python -m headrace.trainer.predict --config FILE`, started by service.predict.

FILE is a PredictWorker as JSON. The process leads a process group of its own and ends with its parent.
"""

from pathlib import Path

from headrace import worker_process
from headrace.trainer.predict.config import PredictWorker
from headrace.trainer.predict.worker import run

OUTPUT = "parts must go there: name a folder that every machine sees at the same path, or an object store"


def start(path: Path) -> None:
    """Read the configuration and run."""
    config = worker_process.config_of(path, PredictWorker)
    name = f"predictor-{config.rank}"
    worker_process.begin(name)
    if config.sees is not None:
        config.sees.check(name)
    if config.sees_output is not None:
        config.sees_output.check(name, OUTPUT, "output")
    run(config)


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
