"""The known launchers, by name. The one place where a launcher is chosen.

Each is imported where it is opened: every check of a job file imports this module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import SpecError
from headrace.extras import require
from headrace.service.cluster.child import Spawner, Starter
from headrace.service.cluster.runtime import LOCAL, Launcher

if TYPE_CHECKING:
    from headrace.identity.authority import Authority
    from headrace.service.cluster.external import JoinPoint

EXTERNAL, RAY = "external", "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings:
    """Settings of launchers. Each launcher reads its own."""

    preload: Sequence[str] = ()
    """Modules that workers import. The local launcher loads them once for all."""
    authority: "Authority | None" = None
    """Renews the certificates of workers of the local launcher; None where they have none."""
    join: "JoinPoint | None" = None
    """Where agents join the external launcher, and that of Ray."""
    ray_address: str = ""
    """Where the Ray launcher finds its cluster."""


@contextmanager
def local_starter(preload: Sequence[str]) -> Iterator[Starter]:
    """Starts processes by forking one that has imported `preload`, where that is possible; else each from nothing."""
    from headrace.service.cluster.forkserver import ForkingStarter, can_fork

    if preload and can_fork():
        with ForkingStarter(preload) as starter:
            yield starter
    else:
        yield Spawner()


@contextmanager
def _local(settings: LauncherSettings) -> Iterator[Launcher]:
    from headrace.service.cluster.local import ProcessLauncher

    with local_starter(settings.preload) as starter, ProcessLauncher(starter, settings.authority) as launcher:
        yield launcher


@contextmanager
def _external(settings: LauncherSettings) -> Iterator[Launcher]:
    assert settings.join is not None, "a run on the external launcher says where agents join"
    from headrace.service.cluster.external import ExternalLauncher

    with ExternalLauncher(settings.join) as launcher:
        yield launcher


@contextmanager
def _ray(settings: LauncherSettings) -> Iterator[Launcher]:
    assert settings.join is not None, "a run on Ray says where agents join"
    check_launcher(RAY)
    from headrace.service.cluster.ray_launcher import RayLauncher

    with RayLauncher(settings.join, settings.ray_address) as launcher:
        yield launcher


LAUNCHERS: Mapping[str, Callable[[LauncherSettings], AbstractContextManager[Launcher]]] = {
    LOCAL: _local,
    EXTERNAL: _external,
    RAY: _ray,
}


def check_launcher(name: str = LOCAL) -> None:
    """Raise SpecError where this machine lacks what the launcher `name` needs, for workers that it starts here too."""
    if name == LOCAL:
        require("torch", "training")
    elif name == RAY:
        require("ray", "every machine of a Ray cluster", "cluster.launcher")


def open_launcher(
    settings: LauncherSettings = LauncherSettings(), name: str = LOCAL
) -> AbstractContextManager[Launcher]:
    """The launcher `name` as a context; no process of it is left at the end. Raises SpecError for an unknown name."""
    if name not in LAUNCHERS:
        raise SpecError(f"there is no launcher {name!r}; known: {', '.join(sorted(LAUNCHERS))}", "cluster.launcher")
    return LAUNCHERS[name](settings)
