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


def yielding(places: Collection[Place], client: str = "") -> Place | None:
    """The place that a new connection of the client at the address `client` takes; None where it has to wait.

    `places` are in the order of their beginning. Those that wait for a client without proof are first, of them those
    of the network that has most, of them the oldest. A request under way is ended only where strangers of one network
    have more than half of the places, and the client is of another one.
    """
    waiting = [place for place in places if place.waits()]
    waiting = [place for place in waiting if not place.proven] or waiting
    if waiting:
        return _oldest_of_most(waiting)
    strangers = [place for place in places if not place.proven]
    most = _oldest_of_most(strangers)
    if most is None or most.network == network_of(client):
        return None
    return most if 2 * sum(place.network == most.network for place in strangers) > len(places) else None


def _oldest_of_most(places: Collection[Place]) -> Place | None:
    """The oldest place of the network that has most."""
    for network, _ in Counter(place.network for place in places).most_common(1):
        return next(place for place in places if place.network == network)
    return None
