"""One shard as a process: `python -m headrace.pserver --config FILE`.

Serves on a unix socket, tells the launcher so, and ends with exit code 0 on SIGTERM or SIGINT.
"""

import logging
from pathlib import Path

from headrace import logs, worker_process
from headrace.failpoints import arm
from headrace.lifecycle import end_with_parent, stop_flag
from headrace.pserver.config import ShardProcess
from headrace.pserver.server.shard_server import ShardServer
from headrace.rpc.rendezvous import RendezvousClient, renewed_identity
from headrace.timeline import recording

log = logging.getLogger(__name__)


def serve(config: ShardProcess) -> None:
    """Serve one shard until a signal says stop. Raises the error that keeps it from serving."""
    arm(config.faults)
    if config.sees is not None:
        config.sees.check(f"shard-{config.shard}")
    with stop_flag() as stopping:
        with (
            recording(config.trace),
            renewed_identity(config.launcher, config.credentials) as identity,
            ShardServer(config, config.socket, failed=stopping.set, identity=identity) as server,
        ):
            if config.launcher is not None:
                RendezvousClient(config.launcher, identity).announce(server.address)
            log.info("shard %d of %d serves at %s", config.shard, config.num_shards, server.address)
            stopping.wait()
            server.check()
            log.info("stopping")


def start(path: Path) -> None:
    """Read the configuration and serve."""
    config = worker_process.config_of(path, ShardProcess)
    logs.setup(f"shard-{config.shard}")
    if config.end_with_stdin:
        end_with_parent()
    serve(config)


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
