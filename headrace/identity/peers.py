"""Names of the processes of a job, as their certificates give them, and rules for the names a process accepts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_LABEL = re.compile(r"([a-z]+)-([0-9]{1,9})")


class PeerRole(StrEnum):
    """The work of a process of a job."""

    HEAD = "head"
    """The launcher, which has the key of the job's authority."""
    SHARD = "shard"
    TRAINER = "trainer"
    PREDICTOR = "predictor"
    READER = "reader"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True, order=True)
class PeerName:
    """One process of one generation of one job."""

    job: str
    generation: int
    role: PeerRole
    number: int
    """From 0 within its role."""

    def __str__(self) -> str:
        return f"{self.role}-{self.number} of generation {self.generation} of job {self.job!r}"

    @property
    def dns(self) -> str:
        """The name in the subject alternative name of its certificate: "shard-0.g3.news"."""
        return f"{self.role}-{self.number}.g{self.generation}.{self.job}"

    @classmethod
    def parse(cls, dns: str) -> "PeerName":
        """The inverse of `dns`. Raises ValueError."""
        process, generation, job = (*dns.split(".", 2), "", "")[:3]
        label, count = _LABEL.fullmatch(process), re.fullmatch(r"g([0-9]{1,18})", generation)
        if label is None or count is None or not job or label[1] not in {role.value for role in PeerRole}:
            raise ValueError(f"{dns!r} is no name of a process of a job, such as 'shard-0.g3.news'")
        return cls(job, int(count[1]), PeerRole(label[1]), int(label[2]))


@dataclass(frozen=True, slots=True)
class PeerRule:
    """The names that a process accepts: of its own job and generation, with these roles and numbers."""

    job: str
    generation: int
    numbers: Mapping[PeerRole, range]

    @classmethod
    def only(cls, name: PeerName) -> "PeerRule":
        """The rule that accepts one name."""
        return cls(name.job, name.generation, {name.role: range(name.number, name.number + 1)})

    def __str__(self) -> str:
        names = [
            f"{role}-{numbers[0]}" if len(numbers) == 1 else f"{role}-{numbers[0]} to {role}-{numbers[-1]}"
            for role, numbers in self.numbers.items()
            if numbers
        ]
        return f"{' or '.join(names) or 'nobody'} of generation {self.generation} of job {self.job!r}"

    def objection(self, name: PeerName) -> str:
        """The reason in words why `name` is refused, or nothing."""
        if name.job != self.job:
            return f"it is {name}, and {self} is expected: it belongs to another job; check the addresses of both"
        if name.generation < self.generation:
            return (
                f"it is {name}, and {self} is expected: it is of an older generation, which has ended; end that process"
            )
        if name.generation > self.generation:
            return (
                f"it is {name}, and {self} is expected: a newer generation runs; this process is left over and must end"
            )
        if name.number not in self.numbers.get(name.role, ()):
            return f"it is {name}, and {self} is expected: is this the address of another process?"
        return ""
