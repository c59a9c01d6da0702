"""The workers that have come to one generation, and where they listen.

A worker that is late, that comes twice, that is of another generation, or that reads other inputs is refused with the
reason. headrace.rpc.rendezvous carries the calls.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from headrace.deadline import Deadline
from headrace.errors import Refused
from headrace.identity import certificates
from headrace.identity.authority import Authority
from headrace.identity.peers import PeerRole
from headrace.identity.renewal import NUM_TRIES
from headrace.rpc.joining import OtherGeneration
from headrace.rpc.rendezvous import Member, ServingWorker
from headrace.service.cluster.runtime import WorkerRole, WorkerSpec
from headrace.shared_folder import check_digests

RANK_0 = f"{WorkerRole.TRAINER}-0"
"""The worker for which the other trainers wait."""
MAX_AGE = 0.5 * (1 + 3 / NUM_TRIES)
"""Share of its life after which a certificate should have been renewed: half of it, and the time for three tries."""


@dataclass(slots=True)
class Roll:
    """The workers of a generation, and what is known of those that have come. Pure."""

    generation: int = 0
    """0: nothing has been started yet."""
    expected: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Digests of inputs by path, by the name of each worker."""
    processes: dict[str, str] = field(default_factory=dict)
    """Incarnations of those that have come, by name."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Where they serve, by name."""
    times: dict[str, int] = field(default_factory=dict)
    """How many processes of a name have told where they serve, by name."""
    certified: dict[str, datetime] = field(default_factory=dict)
    """When their newest certificate was new, by name."""
    collectives: str | None = None
    """Where the store of rank 0 listens; None until it has come."""

    def check(self, member: Member) -> None:
        """Raise Refused, with what was expected, for a worker that is not of this generation."""
        name, number = member.worker, member.generation
        if number < self.generation:
            raise OtherGeneration(
                f"{name} is of generation {number}, which has ended, and generation {self.generation} runs; "
                "end that process"
            )
        if number > self.generation:
            raise OtherGeneration(
                f"{name} is of generation {number}, and this launcher runs generation {self.generation}; "
                "is this the launcher of another run?"
            )
        if name not in self.expected:
            raise Refused(f"generation {number} has no {name}; its workers are {', '.join(self.expected)}")

    def admit(self, member: Member) -> None:
        """Note that `member` has come; a repeat changes nothing. Raises Refused with what was expected."""
        self.check(member)
        name, number = member.worker, member.generation
        if self.processes.setdefault(name, member.incarnation) != member.incarnation:
            where = f", which serves at {self.addresses[name]}" if name in self.addresses else ""
            raise Refused(f"generation {number} has another {name} already{where}; end one of the two processes")

    def announce(self, member: Member, address: str, now: datetime) -> None:
        """Note where `member` serves; a repeat changes nothing. Raises Refused as `admit` does."""
        self.admit(member)
        if self.addresses.get(member.worker) != address:
            self.times[member.worker] = self.times.get(member.worker, 0) + 1
        self.addresses[member.worker] = address
        self.certified.setdefault(member.worker, now)

    def expect_again(self, name: str) -> None:
        """The process that had come by this name is gone, and another one is started."""
        for known in (self.processes, self.addresses, self.certified):
            known.pop(name, None)

    def renew(self, member: Member, now: datetime) -> None:
        """Note that a process has another certificate. Its agent, which has one of the same name, does not count."""
        if self.processes.get(member.worker) == member.incarnation:
            self.certified[member.worker] = now

    def unrenewed(self, now: datetime) -> dict[str, datetime]:
        """The workers that have missed several renewals, with the time of their last one, or of their coming."""
        oldest = now - certificates.LIFETIME * MAX_AGE
        return {name: since for name in self.expected if (since := self.certified.get(name, now)) < oldest}

    def compare(self, member: Member, inputs: Mapping[str, str]) -> None:
        """Raise SpecError where `member` reads other inputs than the launcher."""
        check_digests(member.worker, self.expected[member.worker], inputs)


class Meeting:
    """The rendezvous of one generation after another. Any thread. See headrace.rpc.rendezvous.RendezvousHost."""

    def __init__(self, authority: Authority | None = None) -> None:
        """`authority`: signs the certificates of the workers; None where they have none."""
        self._authority = authority
        self._roll = Roll()
        self._changed = threading.Condition()

    def begin(self, specs: Sequence[WorkerSpec], generation: int) -> None:
        """Expect `specs`, all workers of a generation; those of older ones are refused from now on."""
        with self._changed:
            self._roll = Roll(generation, {spec.name: spec.inputs for spec in specs})
            self._changed.notify_all()

    def address(self, spec: WorkerSpec) -> str | None:
        with self._changed:
            return self._roll.addresses.get(spec.name)

    def meet(self, member: Member, collectives: str, inputs: Mapping[str, str], within: Deadline) -> str | None:
        with self._changed:
            self._roll.admit(member)
            self._roll.compare(member, inputs)
            if member.worker == RANK_0:
                self._roll.collectives = collectives
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._met(member), max(0.0, within.left_s()))
            self._roll.admit(member)  # another generation may have begun meanwhile
            return self._roll.collectives

    def announce(self, member: Member, address: str) -> None:
        with self._changed:
            self._roll.announce(member, address, datetime.now(UTC))

    def expect_again(self, names: Iterable[str]) -> None:
        """Other processes of these names are started in this generation."""
        with self._changed:
            for name in names:
                self._roll.expect_again(name)

    def find(self, member: Member, worker: str) -> ServingWorker | None:
        with self._changed:
            self._roll.check(member)
            address = self._roll.addresses.get(worker)
            return None if address is None else ServingWorker(address, self._roll.times[worker])

    def renew(self, member: Member, signing_request: str, *, proved: bool) -> str:
        """Where no certificate shows the name, only the process that has come gets another
        one."""
        with self._changed:
            self._roll.check(member)
            if not proved and self._roll.processes.get(member.worker) != member.incarnation:
                raise Refused(f"the caller is not the process that has come as {member.worker}")
        if self._authority is None:
            raise Refused(f"the workers of this job have no certificates, and {member.worker} asks for another one")
        role, _, number = member.worker.partition("-")
        name = self._authority.name(member.generation, PeerRole(role), int(number))
        certificate = self._authority.sign(signing_request, name)
        with self._changed:
            self._roll.renew(member, datetime.now(UTC))
        return certificate

    def unrenewed(self) -> dict[str, datetime]:
        with self._changed:
            return {} if self._authority is None else self._roll.unrenewed(datetime.now(UTC))

    def _met(self, member: Member) -> bool:
        return self._roll.collectives is not None or self._roll.generation != member.generation
