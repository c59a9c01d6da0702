"""The process of a prediction worker: `python -m headrace.trainer.predict --config FILE`, started by service.predict.

FILE is a PredictWorker as JSON. The process leads a process group of its own and ends with its parent.
"""

from pathlib import Path

from headrace import worker_process
from headrace.trainer.predict.config import PredictWorker
from headrace.trainer.predict.worker import run


def start(path: Path) -> None:
    """Read the configuration and run."""
    config = worker_process.config_of(path, PredictWorker)
    worker_process.begin(f"predictor-{config.rank}")
    run(config)


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
