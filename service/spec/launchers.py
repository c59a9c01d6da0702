"""The launchers that `cluster.launcher` can name: Headrace's own, and those of installed packages.

A launcher runs the workers of a job somewhere; service.cluster.runtime is the contract of a running one.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headrace.errors import SpecError
from headrace.registry import Registry

if TYPE_CHECKING:
    from headrace.service.spec.config import ClusterSection
    from headrace.service.spec.job import LoadedJob

LOCAL, EXTERNAL, RAY = "local", "external", "ray"


class JobLauncher(ABC):
    """The class of a launcher, as a job file names it. Its settings are keys of the section `cluster`."""

    same_machine: ClassVar[bool] = False
    """Whether all workers are processes of this machine. Others read files of their own machines, and get certificates
    when they join."""
    elastic: ClassVar[bool] = False
    """Whether workers come and go while a job runs (service.cluster.elastic.ElasticLauncher)."""

    @classmethod
    @abstractmethod
    def check(cls, cluster: "ClusterSection") -> None:
        """Raise SpecError for settings that it refuses, and where this machine lacks what its workers need."""

    @classmethod
    @abstractmethod
    def of_job(cls, job: "LoadedJob") -> AbstractContextManager[Any]:
        """A context with the service.cluster.runtime.Launcher of a job whose store is claimed.

        No process of it is left at the end. Raises SpecError and Unavailable.
        """


LAUNCHERS = Registry(
    kind="launcher",
    group="headrace.launchers",
    base=JobLauncher,  # type: ignore[type-abstract]
    own={
        LOCAL: "service.cluster.local:ProcessLauncher",
        EXTERNAL: "service.cluster.external:ExternalLauncher",
        RAY: "service.cluster.ray_launcher:RayLauncher",
    },
)

if TYPE_CHECKING:
    LauncherName = str
else:
    LauncherName = Literal[tuple(LAUNCHERS.names())]


def launcher_of(cluster: "ClusterSection") -> type[JobLauncher]:
    """The class that `cluster.launcher` names. Raises SpecError for one that cannot be loaded."""
    try:
        return LAUNCHERS.load(cluster.launcher)
    except SpecError as error:
        raise SpecError(str(error), "cluster.launcher") from error


def check_launcher(cluster: "ClusterSection") -> None:
    """Raise SpecError where the workers of such a job cannot be started from here."""
    launcher = launcher_of(cluster)
    if cluster.elastic is not None and not launcher.elastic:
        raise SpecError(
            f"a number from {cluster.elastic.min} to {cluster.elastic.max} is for workers that come and go, as with "
            f"cluster.launcher = {EXTERNAL!r}; {cluster.launcher!r} starts a fixed number",
            "cluster.trainers",
        )
    launcher.check(cluster)
