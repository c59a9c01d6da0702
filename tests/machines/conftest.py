"""Test machines for tests: removed at the end of each test, however it ends."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.machines import network
from tests.machines.external_job import ExternalJob, object_store
from tests.machines.network import Machine


@pytest.fixture(scope="session")
def _possible() -> None:
    if reason := network.why_not():
        (pytest.fail if network.required() else pytest.skip)(f"no test machines: {reason}")


@pytest.fixture
def machines(_possible: None) -> Iterator[Callable[[int], list[Machine]]]:
    """Makes machines on one network."""
    with ExitStack() as held:
        yield lambda count: held.enter_context(network.machines(count))


@pytest.fixture
def world(machines: Callable[[int], list[Machine]]) -> Iterator[tuple[list[Machine], Callable[..., ExternalJob]]]:
    """Three machines of a job, and the job: takes its settings, keeps its store on a fourth machine."""
    *of_the_job, disk = machines(4)
    with object_store(disk) as address, ExitStack() as held:
        yield (
            of_the_job,
            lambda *settings, **more: held.enter_context(
                ExternalJob(of_the_job[0], address("of-the-job"), *settings, **more)
            ),
        )
