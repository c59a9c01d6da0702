"""The connections of a server: which one gives way to a new one when the places are taken. Pure.

So no stranger keeps others out by connections on which nothing is asked. headrace.http.listening and
headrace.rpc.tls_listener hold the connections.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from headrace.address import network_of


def _always() -> bool:
    return True


@dataclass(eq=False, slots=True)
class Place:
    """One connection of a server."""

    network: str
    """Where its client is; see address.network_of."""
    end: Callable[[], object]
    """Ends it soon. On the thread that accepts connections."""
    proven: bool = False
    """Whether its client has shown a valid token or certificate. Any thread may set it."""
    waits: Callable[[], bool] = _always
    """Whether the client is to act next: to finish a handshake or a request, or to take an answer."""

    @classmethod
    def of(cls, address: str, end: Callable[[], object]) -> "Place":
        """The place of a new connection of the client at `address`."""
        return cls(network_of(address), end)


def yielding(places: Collection[Place]) -> Place | None:
    """The place that a new connection takes; None where each has a request under way.

    `places` are in the order of their beginning. Those that wait for a client without proof are first, of them those
    of the network that has most, of them the oldest.
    """
    waiting = [place for place in places if place.waits()]
    waiting = [place for place in waiting if not place.proven] or waiting
    if not waiting:
        return None
    [(network, _)] = Counter(place.network for place in waiting).most_common(1)
    return next(place for place in waiting if place.network == network)
