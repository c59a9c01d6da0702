"""Bytes that the collectives of the trainers send, by peer, computed from the algorithms of gloo.

Neither gloo nor NCCL counts its bytes, so they follow from the size of each tensor, B bytes, and the number of ranks W:

    all-reduce   ring: each rank sends about 2 (W-1)/W B to rank - 1, and receives as many from rank + 1
    all-gather   ring: each rank sends (W-1) B to rank + 1, and receives as many from rank - 1
    all-to-all   each rank sends B/W to each other rank
    broadcast    binomial tree from rank 0: B over each edge
    gather       each rank sends its own B to rank 0

NCCL's ring all-reduce, which trainer.collectives.ranks pins, sends as many. tests/machines/test_traffic.py compares
these figures with those of a network link.
"""

from collections.abc import Iterator, Sequence

from headrace.traffic import LinkTraffic


class CollectiveTraffic:
    """The counters of one rank by peer. One thread counts, any thread reads."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self.peers = {f"trainer-{peer}": LinkTraffic() for peer in range(world) if peer != rank}
        """By peer. Waits are for all of them, so they are not here."""

    def _peer(self, rank: int) -> LinkTraffic:
        return self.peers[f"trainer-{rank}"]

    def _neighbours(self, members: Sequence[int]) -> tuple[LinkTraffic, LinkTraffic]:
        """The links to the members before and after this one, in a ring."""
        at = members.index(self._rank)
        return self._peer(members[at - 1]), self._peer(members[(at + 1) % len(members)])

    def all_reduce(self, num_bytes: int, among: Sequence[int] | None = None) -> None:
        """Count one all-reduce `among` some ranks, by default all of them.

        Tensors of fewer than W elements are counted as if they could be split.
        """
        members = among or range(self._world)
        if len(members) > 1:
            before, after = self._neighbours(members)
            moved = 2 * (len(members) - 1) * num_bytes // len(members)
            before.sent(moved)
            after.received(moved)

    def all_gather(self, num_bytes: int, among: Sequence[int] | None = None) -> None:
        """Count one all-gather, to which each rank brings `num_bytes`."""
        members = among or range(self._world)
        if len(members) > 1:
            before, after = self._neighbours(members)
            after.sent((len(members) - 1) * num_bytes)
            before.received((len(members) - 1) * num_bytes)

    def all_to_all(self, num_bytes: int, among: Sequence[int]) -> None:
        """Count one all-to-all, to which each rank brings `num_bytes`."""
        for member in among:
            if member != self._rank:
                self._peer(member).sent(num_bytes // len(among))
                self._peer(member).received(num_bytes // len(among))

    def exchange(self, peer: int, num_sent: int, num_received: int) -> None:
        """Count bytes sent to one other rank, and received from it."""
        self._peer(peer).sent(num_sent)
        self._peer(peer).received(num_received)

    def broadcast(self, num_bytes: int) -> None:
        """Count one broadcast by rank 0."""
        for parent, child in broadcast_edges(self._world):
            if self._rank == parent:
                self._peer(child).sent(num_bytes)
            elif self._rank == child:
                self._peer(parent).received(num_bytes)

    def gather(self, sender: int, num_bytes: int) -> None:
        """Count what one rank sends in a gather at rank 0."""
        if self._rank == sender:
            self._peer(0).sent(num_bytes)
        elif self._rank == 0:
            self._peer(sender).received(num_bytes)


def broadcast_edges(world: int) -> Iterator[tuple[int, int]]:
    """(sender, receiver) of a broadcast by rank 0: in round i the first 2**i ranks send to those 2**i further."""
    distance = 1
    while distance < world:
        yield from ((rank, rank + distance) for rank in range(min(distance, world - distance)))
        distance *= 2
