"""The warm forkserver of a test process: commands that its tests start get their forkservers from it.

A command that starts cold imports torch, kernels and more for each run: some four seconds of a core.
"""

import atexit
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache

import pytest

from headrace.service.cluster.runtime import OF_ANY_JOB
from headrace.service.cluster.warm import warm_forkserver


def lead_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead launchers that the test process has itself, as fault runs do, to its warm forkserver."""
    for name, text in _variables().items():
        monkeypatch.setenv(name, text)


def warm_environment() -> dict[str, str]:
    """The environment of this process, in which launchers find its warm forkserver; the first call starts it."""
    return {**os.environ, **_variables()}


@cache
def _variables() -> Mapping[str, str]:
    held = ExitStack()
    atexit.register(held.close)
    return held.enter_context(warm_forkserver(OF_ANY_JOB))
