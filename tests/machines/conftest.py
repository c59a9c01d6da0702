"""Test machines for tests: removed at the end of each test, however it ends."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.machines import network
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
