"""One shard as a process: `python -m pserver --config FILE`.

Serves on loopback, writes its address, and ends with exit code 0 on SIGTERM or SIGINT.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from millrace import logs, rpc
from millrace.config import validate
from millrace.errors import SpecError
from millrace.lifecycle import end_with_parent, exit_code_of, stop_flag
from millrace.points import arm
from pserver.config import ShardProcess
from pserver.server import ShardServer

log = logging.getLogger(__name__)


def serve(config: ShardProcess) -> None:
    """Serve one shard until a signal says stop."""
    arm(config.faults)
    with stop_flag() as stopping:
        with ShardServer(config) as server:
            rpc.write_address(config.address_file, server.address)
            log.info("shard %d of %d serves at %s", config.shard, config.num_shards, server.address)
            stopping.wait()
            log.info("stopping")


def read_config(path: Path) -> ShardProcess:
    """The process's config. Raises SpecError."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    return validate(ShardProcess, raw)


def main() -> None:
    """Read the config and serve."""
    parser = argparse.ArgumentParser(prog="python -m pserver", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON as pserver.config.ShardProcess describes it")
    config = read_config(parser.parse_args().config)
    logs.setup(f"shard-{config.shard}")
    if config.end_with_stdin:
        end_with_parent()
    serve(config)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
