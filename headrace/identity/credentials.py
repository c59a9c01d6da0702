"""The credentials of one process: its key, its certificate, and the certificate of the job's authority.

The configuration of every process imports this module, so what reads certificates is imported where one is read.
"""

from datetime import datetime
from typing import Protocol, Self

from pydantic import Field

from headrace.config import Section
from headrace.identity.peers import PeerName, PeerRole


class Identity(Protocol):
    """The identity of a process while it runs: its name stays, its certificate is renewed. Any thread."""

    @property
    def current(self) -> "Credentials":
        """The credentials to show at a connection that begins now; the same object until they are renewed."""
        ...


class Credentials(Section):
    """Credentials as PEM text, in the private configuration of a process."""

    authority: str
    """Certificate of the job's authority."""
    certificate: str = ""
    """Certificate of this process; empty: it joins, and has none yet."""
    key: str = Field(default="", repr=False)
    """Private key of this process."""

    @property
    def current(self) -> Self:
        """These are not renewed."""
        return self

    @property
    def ends(self) -> datetime:
        """When its certificate ends."""
        from headrace.identity import certificates

        return certificates.load(self.certificate).not_valid_after_utc

    @property
    def half_life(self) -> datetime:
        """When half the life of its certificate is over, and it is renewed."""
        from headrace.identity import certificates

        return certificates.half_life(certificates.load(self.certificate))

    @property
    def name(self) -> PeerName:
        """The name in its certificate. Raises WrongPeer for one that is damaged."""
        from headrace.identity import certificates

        return certificates.name_of(certificates.load(self.certificate))

    def peer(self, role: PeerRole, number: int) -> PeerName:
        """The name of another process of the same generation."""
        mine = self.name
        return PeerName(mine.job, mine.generation, role, number)
