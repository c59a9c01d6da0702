"""The process of a worker: `python -m MODULE --config FILE`, where FILE is its configuration as JSON."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from headrace import documents, lifecycle, logs
from headrace.config import Model, validate
from headrace.errors import SpecError


def main(description: str | None, start: Callable[[Path], None]) -> NoReturn:
    """Read the command line, call `start` with the path of the configuration, and end with its exit code."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--config", type=Path, required=True, metavar="FILE")
    path = arguments.parse_args().config
    lifecycle.run_to_end(lambda: start(path))


def config_of(path: Path, model: type[Model]) -> Model:
    """The file at `path`, read and checked as a `model`. Raises SpecError."""
    try:
        raw = documents.read_object(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    return validate(model, raw)


def begin(name: str) -> None:
    """Log as `name`, and end with the launcher that started this process."""
    logs.setup(name)
    if os.getpgrp() == os.getpid():  # started by a launcher; in a shell, standard input belongs to a person
        lifecycle.end_with_parent()
