"""A launcher that runs workers on this machine, and notes beside the job file which it has started."""

from collections.abc import Sequence

from headrace.errors import SpecError
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.runtime import WorkerSpec
from headrace.service.spec.config import ClusterSection


class NotingLauncher(ProcessLauncher):
    """For jobs without shards."""

    @classmethod
    def check(cls, cluster: ClusterSection) -> None:
        super().check(cluster)
        if cluster.shards:
            raise SpecError("the noting launcher starts no shards", "cluster.shards")

    def prepare(self, specs: Sequence[WorkerSpec], generation: int) -> None:
        (specs[0].folder / "noted").write_text(" ".join(spec.name for spec in specs))
        super().prepare(specs, generation)
