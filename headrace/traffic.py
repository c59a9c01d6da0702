"""Counters of the traffic of this process with one peer.

They hold figures for operators; nothing is decided by them. Bytes are those of messages, without the headers of TCP,
TLS and ZeroMQ. Arrays in memory that both processes share are counted apart, since no link carries them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class LinkTraffic:
    """One peer, since the process began. One thread at a time writes, any thread reads: there is no lock."""

    sent_bytes: int = 0
    sent_messages: int = 0
    received_bytes: int = 0
    received_messages: int = 0
    shared_sent_bytes: int = 0
    """Of arrays beside the messages, in memory that both processes share."""
    shared_received_bytes: int = 0
    wait_s: float = 0.0
    """Seconds that this process waited for the peer's messages."""

    def sent(self, num_bytes: int, shared_bytes: int = 0) -> None:
        """Count a message to the peer."""
        self.sent_messages += 1
        self.sent_bytes += num_bytes
        self.shared_sent_bytes += shared_bytes

    def received(self, num_bytes: int, shared_bytes: int = 0) -> None:
        """Count a message of the peer."""
        self.received_messages += 1
        self.received_bytes += num_bytes
        self.shared_received_bytes += shared_bytes

    def plus(self, other: "LinkTraffic") -> "LinkTraffic":
        """The sum of two connections to the same peer."""
        theirs = asdict(other)
        return LinkTraffic(**{name: value + theirs[name] for name, value in asdict(self).items()})

    def figures(self) -> dict[str, int | float]:
        """As JSON-able data."""
        return {**asdict(self), "wait_s": round(self.wait_s, 6)}


Links = Mapping[str, Mapping[str, int | float]]
"""The figures of one process by peer: "shard-0", "trainer-1"."""


def links_of(traffic: Mapping[str, LinkTraffic]) -> Links:
    """The figures of all peers that had any traffic."""
    return {peer: link.figures() for peer, link in traffic.items() if link.sent_messages or link.received_messages}
