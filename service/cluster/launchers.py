"""The known launchers, by name. The one place where a launcher is chosen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from millrace.errors import SpecError
from service.cluster.child import Spawner, Starter
from service.cluster.forkserver import ForkingStarter, can_fork
from service.cluster.local import ProcessLauncher
from service.cluster.runtime import Launcher

LOCAL = "local"
"""The launcher of every job, until there is another one to choose."""


@contextmanager
def local_starter(preload: Sequence[str]) -> Iterator[Starter]:
    """Starts processes by forking one that has imported `preload`, where that is possible; else each from nothing."""
    if preload and can_fork():
        with ForkingStarter(preload) as starter:
            yield starter
    else:
        yield Spawner()


@contextmanager
def _local(preload: Sequence[str]) -> Iterator[Launcher]:
    with local_starter(preload) as starter:
        yield ProcessLauncher(starter)


LAUNCHERS: Mapping[str, Callable[[Sequence[str]], AbstractContextManager[Launcher]]] = {LOCAL: _local}


def open_launcher(preload: Sequence[str] = (), name: str = LOCAL) -> AbstractContextManager[Launcher]:
    """The launcher `name` as a context; no process of it is left at the end. Raises SpecError for an unknown name.

    `preload`: modules that workers import. A launcher may load them once for all.
    """
    if name not in LAUNCHERS:
        raise SpecError(f"there is no launcher {name!r}; known: {', '.join(sorted(LAUNCHERS))}", "cluster.launcher")
    return LAUNCHERS[name](preload)
