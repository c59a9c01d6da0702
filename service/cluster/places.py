"""Which agent has which worker of a generation. Pure: each call takes the time.

Agents ask by a rank, as torchrun gives one, or get places by their order of joining. service.cluster.external acts.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace.errors import Refused, SpecError, Unavailable
from headrace.printable import counted
from headrace.rpc.joining import AgentFacts
from headrace.service.cluster.elastic import Attendance
from headrace.service.cluster.runtime import WorkerRole

RANK_0 = f"{WorkerRole.TRAINER}-0"
"""Rank 0 keeps the job's log and store, so it runs at the head unless an agent elsewhere asks for it by its rank."""

MAX_SPARES = 64
"""Most agents that wait as spares, where the number of trainers is elastic."""


class Places:
    """The workers of the generation in preparation or running, and the agents that have them."""

    def __init__(
        self, head: str, node_timeout_s: float, *, rank0_here: bool = False, elastic_since_s: float | None = None
    ) -> None:
        """`head`: the machine of the launcher. An agent that is silent for `node_timeout_s` loses its place.

        `rank0_here`: rank 0 cannot run elsewhere, not even by its rank. `elastic_since_s`: the number of trainers
        changes with that of agents, all of whom may still come at this time: those without a place wait as spares.
        """
        self._head, self._node_timeout_s, self._rank0_here = head, node_timeout_s, rank0_here
        self._elastic_since_s = elastic_since_s
        self._generation = 0
        self._names: tuple[str, ...] = ()
        self._idle: frozenset[str] = frozenset()  # of these
        self._ending = False
        self._agents: dict[str, AgentFacts] = {}  # by name of the worker
        self._heard_s: dict[str, float] = {}  # by id of the agent, also of those without a place
        self._came_s: dict[str, float] = {}  # by id of the agent
        self._left_s: dict[str, float] = {}  # by id of an agent that left of late
        self._asked: dict[str, AgentFacts] = {}  # by id: agents that asked since `open`
        self._readers_since_s: float | None = None  # since when readers alone are missing

    def open(self, names: Sequence[str], generation: int, idle: Sequence[str] = ()) -> None:
        """Offer the workers of a generation; trainers come first. No agent has a place in it yet.

        `idle`: places for agents that have no work in this generation, but will have in others.
        """
        trainers_first = [*sorted(names, key=lambda name: _role_of(name) is not WorkerRole.TRAINER), *idle]
        self._idle = frozenset(idle)
        self._names, self._generation, self._agents, self._asked = tuple(trainers_first), generation, {}, {}
        self._ending, self._readers_since_s = False, None

    def free(self, reader: str, agent: str) -> None:
        """A reader of this agent has ended, and its generation may go on: the agent that asks next gets its place."""
        self._agents = {name: a for name, a in self._agents.items() if (name, a.id) != (reader, agent)}

    def close(self, ended: str) -> None:
        """Offer nothing more until `open`: a worker has `ended`, and new agents wait for the next generation.

        The late end of a worker that is not offered now closes nothing.
        """
        self._ending |= ended in self._names

    @property
    def agents(self) -> Mapping[str, AgentFacts]:
        """The agent of each worker, as far as there is one."""
        return self._agents

    @property
    def known(self) -> frozenset[str]:
        """Identities of all agents that were heard of late."""
        return frozenset(self._heard_s)

    def ask(self, agent: AgentFacts, now_s: float) -> str | None:
        """The worker that `agent` gets; None while there is none for it. Raises SpecError, Refused, Unavailable."""
        self._heard_s[agent.id] = now_s
        self._came_s.setdefault(agent.id, now_s)
        self._asked[agent.id] = agent
        for name, holder in self._agents.items():
            if holder.id == agent.id:
                return name
        if not self._names or self._ending:
            return None
        try:
            place = self._free_place(agent)
        except (SpecError, Refused, Unavailable):
            self._forget(agent.id)
            raise
        if place is not None:
            self._agents[place] = agent
        return place

    def heard(self, agent: str, now_s: float) -> None:
        """An agent with this identity reported."""
        self._heard_s[agent] = now_s

    def leave(self, agent: str, *, for_good: bool = False) -> None:
        """An agent with this identity is gone; if not `for_good`, it or another one may come for it soon."""
        if (heard_s := self._heard_s.get(agent)) is not None and not for_good:
            self._left_s = {id_: s for id_, s in self._left_s.items() if s > heard_s - self._node_timeout_s}
            self._left_s[agent] = heard_s
        self._forget(agent)

    def attendance(self, now_s: float, apart: Collection[str] = ()) -> Attendance:
        """The agents as far as they can be trainers, but for those with an identity in `apart`."""
        asked = {id_: agent for id_, agent in self._asked.items() if id_ not in apart}
        servers = [name for name in self._names if _role_of(name) is not WorkerRole.TRAINER]
        readers = [name for name in servers if _role_of(name) is WorkerRole.READER]
        least = [name for name in servers if name not in readers[1:]]
        placed = {agent.id for agent in self._agents.values()}
        waiting = [agent for agent in asked.values() if agent.id not in placed]
        spares = [agent.id for agent in waiting if agent.role in (WorkerRole.TRAINER.value, None)]
        num_spares = _for_trainers(waiting, [name for name in servers if name not in self._agents])
        return Attendance(
            able=_for_trainers(asked.values(), servers) or _for_trainers(asked.values(), least),
            leads=RANK_0 in self._agents or RANK_0 not in self._names,  # predictions have none
            may_come=self._may_come(now_s, asked),
            spares=num_spares,
            spare_s=max((now_s - self._came_s[id_] for id_ in spares), default=0.0) if num_spares else 0.0,
        )

    def _may_come(self, now_s: float, asked: Mapping[str, AgentFacts]) -> bool:
        """Whether more agents may ask soon than have. All those of one torchrun have asked if as many as it counts."""
        if asked and all(agent.rank is not None and agent.world == len(asked) for agent in asked.values()):
            return False
        since_s = -math.inf if self._elastic_since_s is None else self._elastic_since_s
        late_s = max([since_s, *self._left_s.values()])
        return now_s - late_s < self._node_timeout_s or any(id_ not in self._asked for id_ in self._heard_s)

    def _forget(self, agent: str) -> None:
        for known in (self._heard_s, self._came_s, self._asked):
            known.pop(agent, None)
        self._agents = {name: holder for name, holder in self._agents.items() if holder.id != agent}

    def silent(self, now_s: float) -> dict[str, str | None]:
        """Agents that were silent for too long, with the worker of each; they lose their places."""
        late = sorted(agent for agent, heard_s in self._heard_s.items() if now_s - heard_s > self._node_timeout_s)
        found = {agent: next((name for name, a in self._agents.items() if a.id == agent), None) for agent in late}
        for agent in late:
            self._forget(agent)
        return found

    def starts_without(self, now_s: float) -> tuple[str, ...]:
        """The readers without which the workers start: only readers are missing since long, and one is there.

        It counts from its first call with all others there.
        """
        missing = self._missing()
        if not self._only_readers(missing):
            self._readers_since_s = None
            return ()
        self._readers_since_s = now_s if self._readers_since_s is None else self._readers_since_s
        return tuple(missing) if now_s - self._readers_since_s >= self._node_timeout_s else ()

    def waits_for(self) -> str | None:
        """The missing workers in words; None if there are none."""
        missing, num = self._missing(), len(self._names) - len(self._idle)
        if not missing:
            return None
        text = f"waits for {len(missing)} of {num} workers: {', '.join(missing)}"
        if not self._only_readers(missing):
            return text
        others = "it" if len(missing) == 1 else "them"
        return f"{text}; starts without {others} after {self._node_timeout_s:g} s (cluster.node_timeout)"

    def _missing(self) -> list[str]:
        return [name for name in self._names if name not in self._idle and name not in self._agents]

    def _only_readers(self, missing: Sequence[str]) -> bool:
        """Whether readers alone are missing, and not all of them."""
        readers = [name for name in self._names if _role_of(name) is WorkerRole.READER and name not in self._idle]
        return bool(missing) and set(missing) < set(readers)

    def local_rank(self, name: str) -> tuple[int, int]:
        """The rank of a trainer among those of its machine, and their number. Its place must be taken."""
        agent, role = self._agents[name], _role_of(name)
        beside = [n for n in self._names if n in self._agents and self._agents[n].machine == agent.machine]
        trainers = [n for n in beside if _role_of(n) is role]
        return trainers.index(name) if agent.local_rank is None else agent.local_rank, len(trainers)

    def bring_together(self) -> None:
        """Make trainers of one machine neighbours: sums go around a ring of all, which then leaves a machine once.

        Rank 0 keeps its place, and so does an agent that asked by a rank, or for the worker that it ran last.
        """
        held = {name: self._agents[name] for name in self._trainers() if name in self._agents}
        machines = list(dict.fromkeys(agent.machine for agent in held.values()))
        movable = [name for name, a in held.items() if name != RANK_0 and a.rank is None and a.last is None]
        agents = sorted((held[name] for name in movable), key=lambda agent: machines.index(agent.machine))
        self._agents.update(zip(movable, agents, strict=True))

    def divided_group(self, size: int) -> tuple[str, ...]:
        """The first group of `size` neighbouring trainers whose agents are on several machines; () if there is none."""
        trainers = self._trainers()
        for first in range(0, len(trainers), size):
            group = trainers[first : first + size]
            if len({self._agents[name].machine for name in group if name in self._agents}) > 1:
                return tuple(group)
        return ()

    def _trainers(self) -> list[str]:
        return [name for name in self._names if _role_of(name) is WorkerRole.TRAINER]

    def _free_place(self, agent: AgentFacts) -> str | None:
        names = [name for name in self._names if agent.role in (None, _role_of(name).value)]
        elastic = self._elastic_since_s is not None
        if agent.rank is not None and not (elastic and agent.world != len(names)):
            return self._place_of_rank(agent, agent.rank)
        if not names:
            raise SpecError(f"generation {self._generation} has no {agent.role}s; its workers are {self._counts()}")
        free = [name for name in names if name not in self._agents]
        if not free and elastic and len(self._heard_s) - len(self._agents) <= MAX_SPARES:
            return None
        if not free:
            raise Unavailable(
                f"generation {self._generation} has all of its workers ({self._counts()}); this worker is one too many"
            )
        if agent.machine != self._head and RANK_0 in free:
            free.remove(RANK_0)
        elif elastic and free[0] == RANK_0:
            return RANK_0  # the agent that had it may not come back
        if agent.last in free:
            return agent.last
        return free[0] if free else None

    def _place_of_rank(self, agent: AgentFacts, rank: int) -> str:
        names = [name for name in self._names if agent.role in (None, _role_of(name).value)]
        kind = "workers" if agent.role is None else f"{agent.role}s"
        if agent.world not in (len(names), len(set(names) - self._idle)) or rank >= len(names):
            raise SpecError(
                f"this worker has RANK {rank} of WORLD_SIZE {agent.world}, and the job has {len(names)} {kind} "
                f"({self._counts()}); start {len(names)} of them, or change cluster.trainers and cluster.shards"
            )
        if names[rank] == RANK_0 and self._rank0_here and agent.machine != self._head:
            raise SpecError(
                f"RANK {rank} is {RANK_0}, which keeps the job's log and store at the machine of `headrace run`: start "
                "the process of this RANK there, for torchrun by --node-rank 0"
            )
        if (holder := self._agents.get(names[rank])) is not None:
            raise Unavailable(
                f"RANK {rank} of generation {self._generation} is {names[rank]}, which an agent of "
                f"{'this' if holder.machine == agent.machine else 'another'} machine runs already; give each worker a "
                "RANK of its own"
            )
        return names[rank]

    def _counts(self) -> str:
        counts = Counter(_role_of(name) for name in self._names)
        return ", ".join(f"{counted(number, role)}" for role, number in counts.items())


def _for_trainers(agents: Iterable[AgentFacts], servers: Iterable[str]) -> int:
    """How many of the agents can be trainers once each of `servers` has one; 0 while one has none."""
    roles = Counter(agent.role for agent in agents)
    needed: Counter[str | None] = Counter(_role_of(name).value for name in servers)
    without_role = roles[None] - (needed - roles).total()
    return without_role + roles[WorkerRole.TRAINER.value] if without_role >= 0 else 0


def _role_of(name: str) -> WorkerRole:
    """The role as agents are started for it: a predictor runs where a trainer does."""
    role = WorkerRole(name.partition("-")[0])
    return WorkerRole.TRAINER if role is WorkerRole.PREDICTOR else role
