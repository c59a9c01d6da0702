"""One reader as a process: `python -m headrace.dataset.reader --config FILE`.

Serves on a unix socket, tells the launcher so, and ends with exit code 0 on SIGTERM or SIGINT.
"""

import logging
from pathlib import Path

from headrace import worker_process
from headrace.dataset.reader.config import ReaderProcess
from headrace.dataset.reader.server import ReaderServer
from headrace.failpoints import arm
from headrace.lifecycle import stop_flag
from headrace.rpc.rendezvous import RendezvousClient, renewed_identity
from headrace.shared_folder import check_digests, digests
from headrace.timeline import recording

log = logging.getLogger(__name__)


def serve(config: ReaderProcess) -> None:
    """Serve until a signal says stop. Raises SpecError where files or the pipe are not those of the head."""
    arm(config.faults)
    check_digests(f"reader-{config.reader}", config.digests, digests(config.inputs, config.folder))
    with (
        stop_flag() as stopping,
        recording(config.trace),
        renewed_identity(config.launcher, config.credentials) as identity,
        ReaderServer(config, config.socket, identity) as server,
    ):
        if config.launcher is not None:
            RendezvousClient(config.launcher, identity).announce(server.address)
        log.info("reader %d of %d serves at %s", config.reader, config.num_readers, server.address)
        stopping.wait()
        log.info("stopping")


def start(path: Path) -> None:
    """Read the configuration and serve."""
    config = worker_process.config_of(path, ReaderProcess)
    worker_process.begin(f"reader-{config.reader}")
    serve(config)


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
