"""Which agent has which worker of a generation. Pure: each call takes the time.

Agents ask by a rank, as torchrun gives one, or get places by their order of joining. service.cluster.external acts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.errors import Refused, SpecError, Unavailable
from headrace.rpc.joining import AgentFacts
from headrace.service.cluster.runtime import WorkerRole

RANK_0 = f"{WorkerRole.TRAINER}-0"
"""Rank 0 keeps the job's log and store, so it runs at the head unless an agent elsewhere asks for it by its rank."""


class Places:
    """The workers of the generation in preparation or running, and the agents that have them."""

    def __init__(self, head: str, node_timeout_s: float, *, rank0_here: bool = False) -> None:
        """`head`: the machine of the launcher. An agent that is silent for `node_timeout_s` loses its place.

        `rank0_here`: rank 0 cannot run elsewhere, not even by its rank.
        """
        self._head, self._node_timeout_s, self._rank0_here = head, node_timeout_s, rank0_here
        self._generation = 0
        self._names: tuple[str, ...] = ()
        self._ending = False
        self._agents: dict[str, AgentFacts] = {}  # by name of the worker
        self._heard_s: dict[str, float] = {}  # by id of the agent, also of those without a place

    def open(self, names: Sequence[str], generation: int) -> None:
        """Offer the workers of a generation; trainers come first. No agent has a place in it yet."""
        trainers_first = sorted(names, key=lambda name: _role_of(name) is not WorkerRole.TRAINER)
        self._names, self._generation, self._agents = tuple(trainers_first), generation, {}
        self._ending = False

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
        for name, holder in self._agents.items():
            if holder.id == agent.id:
                return name
        if not self._names or self._ending:
            return None
        try:
            place = self._free_place(agent)
        except (SpecError, Refused, Unavailable):
            del self._heard_s[agent.id]
            raise
        if place is not None:
            self._agents[place] = agent
        return place

    def heard(self, agent: str, now_s: float) -> None:
        """An agent with this identity reported."""
        self._heard_s[agent] = now_s

    def leave(self, agent: str) -> None:
        """An agent with this identity is gone."""
        self._heard_s.pop(agent, None)
        self._agents = {name: holder for name, holder in self._agents.items() if holder.id != agent}

    def silent(self, now_s: float) -> dict[str, str | None]:
        """Agents that were silent for too long, with the worker of each; they lose their places."""
        late = sorted(agent for agent, heard_s in self._heard_s.items() if now_s - heard_s > self._node_timeout_s)
        found = {agent: next((name for name, a in self._agents.items() if a.id == agent), None) for agent in late}
        for agent in late:
            self.leave(agent)
        return found

    def waits_for(self) -> str | None:
        """The missing workers in words; None if there are none."""
        missing = [name for name in self._names if name not in self._agents]
        if not missing:
            return None
        return f"waits for {len(missing)} of {len(self._names)} workers: {', '.join(missing)}"

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
        if agent.rank is not None:
            return self._place_of_rank(agent, agent.rank)
        names = [name for name in self._names if agent.role in (None, _role_of(name).value)]
        if not names:
            raise SpecError(f"generation {self._generation} has no {agent.role}s; its workers are {self._counts()}")
        free = [name for name in names if name not in self._agents]
        if not free:
            raise Unavailable(
                f"generation {self._generation} has all of its workers ({self._counts()}); this worker is one too many"
            )
        if agent.machine != self._head and RANK_0 in free:
            free.remove(RANK_0)
        if agent.last in free:
            return agent.last
        return free[0] if free else None

    def _place_of_rank(self, agent: AgentFacts, rank: int) -> str:
        names = [name for name in self._names if agent.role in (None, _role_of(name).value)]
        kind = "workers" if agent.role is None else f"{agent.role}s"
        if agent.world != len(names) or rank >= len(names):
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
        return ", ".join(f"{number} {role}{'s' if number > 1 else ''}" for role, number in counts.items())


def _role_of(name: str) -> WorkerRole:
    return WorkerRole(name.partition("-")[0])
