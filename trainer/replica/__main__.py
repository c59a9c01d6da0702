"""`python -m headrace.trainer.replica CONFIG` runs a replica, as `headrace replica` does; CONFIG is JSON."""

import sys

from headrace import documents, logs
from headrace.config import validate
from headrace.errors import SpecError
from headrace.lifecycle import run_to_end
from headrace.trainer.replica.config import ReplicaConfig
from headrace.trainer.replica.replica import run


def main() -> None:
    """Run until a signal."""
    if len(sys.argv) != 2:
        raise SpecError("needs one argument: a ReplicaConfig as JSON")
    try:
        content = documents.parse_object(sys.argv[1], "the argument")
    except documents.InvalidDocument as error:
        raise SpecError(str(error)) from error
    logs.setup("replica")
    run(validate(ReplicaConfig, content))


if __name__ == "__main__":
    run_to_end(main)
