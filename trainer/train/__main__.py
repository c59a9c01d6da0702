"""One trainer process: `python -m headrace.trainer.train --config FILE`, started by a launcher.

FILE is a WorkerConfig as JSON. The process leads a process group of its own and ends with its launcher.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headrace import worker_process
from headrace.address import address_of
from headrace.deadline import Deadline
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerRole, PeerRule
from headrace.rpc import role
from headrace.rpc.rendezvous import RendezvousClient, renewed_identity
from headrace.rpc.tls_listener import TlsEndpoint
from headrace.timeline import recording
from headrace.trainer.config import WorkerConfig
from headrace.trainer.journal.succession import end_when_superseded, raise_superseded
from headrace.trainer.rank0.parts import CLOSE_S
from headrace.trainer.rank0.resizing import Standby
from headrace.trainer.train.assembly import Trainer, open_trainer
from headrace.trainer.train.report import digest_of, write_report
from headrace.trainer.train.standby_role import StandbyRole

log = logging.getLogger(__name__)


def run(config: WorkerConfig) -> None:
    """Train; at the end of the job rank 0 writes the report."""
    with recording(config.trace), _opened(config) as trainer:
        trainer.loop.run()
        if trainer.loop.resizes:
            log.info("the job is resized: generation %d ends", config.generation)
        elif config.rank == 0:
            finish(trainer)


@contextmanager
def _opened(config: WorkerConfig) -> Iterator[Trainer]:
    """The trainer, ready to run, and its Role, which one that stands by serves from its beginning."""
    with ExitStack() as held:
        identity = held.enter_context(renewed_identity(config.launcher, config.credentials))
        if config.stands_by is not None:
            standby = Standby(config.store, config.stands_by)
            served = StandbyRole(standby, config.generation)
            held.enter_context(
                _served(
                    *(config, identity, served.status, served.drain),
                    commit=served.commit,
                    answer=served.answer,
                    exchange=served.exchange,
                )
            )
            trainer = held.enter_context(open_trainer(config, standby=standby, identity=identity))
            served.begin(trainer)
            held.callback(served.end)
        else:
            trainer = held.enter_context(open_trainer(config, identity=identity))
            committer = trainer.committer
            commit = None if committer is None else committer.ask
            held.enter_context(
                _served(
                    *(config, identity, trainer.parts.progress.status, trainer.loop.drain),
                    commit=commit,
                    answer=trainer.answer,
                    exchange=role.no_messages if trainer.rank0 is None else trainer.rank0.exchange,
                )
            )
        yield trainer


@contextmanager
def _served(
    config: WorkerConfig,
    identity: Identity | None,
    status: Callable[[], object],
    drain: Callable[[], None],
    commit: Callable[[], None] | None,
    answer: role.Answer | None,
    exchange: role.Exchange,
) -> Iterator[None]:
    """Serve the Role of this process, whose address the launcher hears."""
    endpoint = _endpoint(config, identity)
    with role.serve_role(status, drain, config.secret, config.socket, commit, answer, endpoint, exchange) as server:
        if config.launcher is not None:
            RendezvousClient(config.launcher, identity).announce(server.address)
        yield


def _endpoint(config: WorkerConfig, identity: Identity | None) -> TlsEndpoint | None:
    """Where rank 0 serves its Role beside the unix socket: for the launcher alone, if it has an identity."""
    if identity is None or config.rank != 0:
        return None
    mine = identity.current.name
    accepts = PeerRule(mine.job, mine.generation, {PeerRole.HEAD: range(1)})
    return TlsEndpoint(address_of(config.interface), identity, accepts)


def finish(trainer: Trainer) -> None:
    """Rank 0: write the report."""
    parts, deadline = trainer.parts, Deadline.after(CLOSE_S)
    digest = digest_of(parts.shards, parts.dense, deadline)
    compared = () if trainer.rank0 is None else trainer.rank0.replay_log.compared
    write_report(trainer.store, parts.progress, parts.observer.report(), digest, compared, trainer.job.join)
    log.info("done: version %d, digest %s", parts.progress.version, digest)


def start(path: Path) -> None:
    """Read the configuration and run."""
    config = worker_process.config_of(path, WorkerConfig)
    worker_process.begin(f"trainer-{config.rank}")
    if config.sees is not None:
        config.sees.check(f"trainer-{config.rank}")
    if config.rerun is not None:  # a rerun claims no generation
        run(config)
        return
    end_when_superseded(config.store / "log", config.generation)
    with raise_superseded(config.store / "log", config.generation):
        run(config)


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
