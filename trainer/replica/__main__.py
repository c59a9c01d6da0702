"""`python -m trainer.replica CONFIG` runs a replica, as `millrace replica` does; CONFIG is a ReplicaConfig as JSON."""

import sys

from millrace import documents, logs
from millrace.config import validate
from millrace.errors import SpecError
from millrace.lifecycle import run_to_end
from trainer.replica.config import ReplicaConfig
from trainer.replica.replica import run


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
