"""The resources of a generation on a Ray cluster: its bundles, and in words which of them are missing. Pure.

service.cluster.ray_driver asks Ray.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.service.cluster.runtime import WorkerSpec

GIB = 1 << 30
HERE = 0.001
"""The share of a node's own resource "node:ADDRESS" that binds a bundle to that node."""
UNITS = {"CPU": "core", "GPU": "GPU", "memory": "GiB of memory"}
"""Kinds of resources in Ray's words, and in ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeeds:
    """A worker, and what it needs on its node."""

    worker: str
    agent: str
    """Identity of its agent, drawn anew for each attempt to place it."""
    cores: float = 1.0
    memory_bytes: int = 0
    gpus: int = 0
    here: bool = False
    """It runs at the machine of the launcher."""

    @classmethod
    def of(cls, spec: WorkerSpec, agent: str, here: bool) -> "WorkerNeeds":
        """The needs of a worker of a plan."""
        given = spec.resources
        return cls(
            worker=spec.name,
            agent=agent,
            cores=given.cores or 1.0,
            memory_bytes=given.memory_bytes or 0,
            gpus=given.gpus or 0,
            here=here,
        )

    def as_json(self) -> dict[str, Any]:
        """For the driver, which reads it as keyword arguments."""
        return asdict(self)

    def bundle(self, this_node: str) -> dict[str, float]:
        """In Ray's words; `this_node` is the address of the launcher's node."""
        wanted = {"CPU": self.cores, "GPU": float(self.gpus), "memory": float(self.memory_bytes)}
        bound = {f"node:{this_node}": HERE} if self.here else {}
        return {**{kind: number for kind, number in wanted.items() if number}, **bound}


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster, and all that it has."""

    address: str
    total: Mapping[str, float]


def missing(
    needs: Sequence[WorkerNeeds], nodes: Sequence[Node], free: Mapping[str, float], this_node: str, cluster: str
) -> str:
    """The things that `needs` lack on the Ray cluster at `cluster`, and those that it has; for after "waits for".

    `free`: what is left of each kind on all nodes together.
    """
    at = f"the Ray cluster at {cluster}"
    bundles = {need.worker: need.bundle(this_node) for need in needs}
    lacks = dict(_deficits(list(bundles.values()), free))
    if lacks:
        wanted = " and ".join(_count(number, kind, "more ") for kind, number in lacks.items())
        return f"{wanted} on {at}, which has {_has(lacks, nodes, free)}"
    for worker, bundle in bundles.items():
        if not any(_fits(bundle, node.total) for node in nodes):
            wanted = ", ".join(_count(number, kind) for kind, number in bundle.items() if kind in UNITS)
            where = f"this machine ({this_node})" if f"node:{this_node}" in bundle else "one node"
            return f"{wanted} for {worker} on {where} of {at}, which has {_nodes(nodes)}"
    return f"{len(needs)} places on {at}: enough is free, but not together on single nodes"


def _deficits(bundles: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for kind in UNITS:
        wanted = sum(bundle.get(kind, 0.0) for bundle in bundles)
        if wanted > free.get(kind, 0.0):
            yield kind, wanted - free.get(kind, 0.0)


def _has(kinds: Mapping[str, float], nodes: Sequence[Node], free: Mapping[str, float]) -> str:
    parts = []
    for kind in kinds:
        total = sum(node.total.get(kind, 0.0) for node in nodes)
        left = f" ({_number(free.get(kind, 0.0), kind)} free)" if total else ""
        parts.append(f"{_count(total, kind)}{left}")
    return f"{' and '.join(parts)} on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"


def _nodes(nodes: Sequence[Node]) -> str:
    """The nodes with what each has."""
    return "; ".join(
        f"{node.address}: {', '.join(_count(node.total.get(kind, 0.0), kind) for kind in UNITS)}" for node in nodes
    )


def _fits(bundle: Mapping[str, float], total: Mapping[str, float]) -> bool:
    return all(total.get(kind, 0.0) >= number for kind, number in bundle.items())


def _count(number: float, kind: str, more: str = "") -> str:
    """Such as "2 cores", "1 more GPU", "1.5 GiB of memory"."""
    text, unit = _number(number, kind), UNITS[kind]
    many = text != "1" and kind != "memory"
    return f"{text if number else 'no'} {more}{unit}{'s' if many else ''}"


def _number(number: float, kind: str) -> str:
    return f"{number / GIB:.1f}" if kind == "memory" else f"{number:.4g}"
