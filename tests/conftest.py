"""What all tests share."""

import gc
import logging
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# Several processes share the cores. Threads of torch that wait for each other then spin longer than tests compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nor do the processes that tests start compile the same modules each time, whatever the caller's environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if TYPE_CHECKING:
    from tests.kafka.cluster import Cluster
    from tests.postgres.cluster import Cluster as Postgres

# The same examples at every run; no limit on time, since a kernel compiles at its first call. `make soak` tries more.
settings.register_profile("headrace", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("soak", deadline=None, max_examples=400, print_blob=True)
settings.load_profile("headrace")


# The top folders are imported below headrace alone, although pytest has the root of the checkout on its path.
sys.modules.update(dict.fromkeys(("dataset", "pserver", "service", "trainer")))  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """kafka-python cancels a connection that it is making when its client closes, and leaves the socket to Python's
    garbage collector: a warning of the library's, no failure of the test."""
    for item in items:
        if item.get_closest_marker("kafka"):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket.*proto=6:ResourceWarning"))


def pytest_collection_finish() -> None:
    """Tests and libraries stay: looking for garbage among their objects would take seconds each time."""
    gc.collect()
    gc.freeze()
    # In each phase pytest attaches itself to all loggers that do not propagate.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _same_randomness_at_each_run(request: pytest.FixtureRequest) -> None:
    """Initial weights that a test leaves to chance are the same at each run, in whichever order tests run."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)  # manual_seed notes the stack for each kind of device, every time
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@pytest.fixture(autouse=True)
def _no_sockets_of_kafka_python_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collects them before the next test, whose warnings are errors."""
    yield
    if request.node.get_closest_marker("kafka"):
        gc.collect()


def _started(folder: Path) -> Iterator["Cluster"]:
    from tests.kafka.cluster import Cluster, required, why_not  # only tests with a broker pay for its client

    if reason := why_not():
        (pytest.fail if required() else pytest.skip)(f"no Kafka: {reason}")
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of the test start by the warm forkserver of all tests, also those whose launcher is this process."""
    from tests.fakes.warm import lead_launchers

    lead_launchers(monkeypatch)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Cluster"]:
    """A running broker that all tests share: make topics of your own, and leave it running."""
    yield from _started(tmp_path_factory.mktemp("kafka"))


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator["Cluster"]:
    """A running broker of the test's own, to stop, kill and start again."""
    yield from _started(tmp_path / "kafka")


@pytest.fixture(scope="session")
def postgres() -> Iterator["Postgres"]:
    """A running PostgreSQL that all tests share: take databases of your own, and leave it running."""
    from tests.postgres import cluster

    if reason := cluster.why_not():
        (pytest.fail if cluster.required() else pytest.skip)(f"no PostgreSQL: {reason}")
    made = cluster.Cluster()
    try:
        made.start()
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def new_database(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """Gives the URL of a new database, of each kind in turn; SQLite's is in the folder that is named."""
    if request.param == "sqlite":
        return lambda folder: f"sqlite:///{folder}/records.db"
    postgres: Postgres = request.getfixturevalue("postgres")
    return lambda _: postgres.database()


@pytest.fixture
def url(new_database: Callable[[Path], str], tmp_path: Path) -> str:
    """The URL of a new database of each kind."""
    return new_database(tmp_path)
