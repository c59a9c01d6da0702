"""What all tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.kafka.cluster import Cluster

# The same examples at every run; no limit on time, since a kernel compiles at its first call.
settings.register_profile("millrace", deadline=None, derandomize=True)
settings.load_profile("millrace")


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


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Cluster"]:
    """A running broker that all tests share: make topics of your own, and leave it running."""
    yield from _started(tmp_path_factory.mktemp("kafka"))


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator["Cluster"]:
    """A running broker of the test's own, to stop, kill and start again."""
    yield from _started(tmp_path / "kafka")
