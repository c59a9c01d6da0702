"""The credentials of one process: its key, its certificate, and the certificate of the job's authority."""

from pydantic import Field

from millrace.config import Section
from millrace.identity import certificates
from millrace.identity.peers import PeerName, PeerRole


class Credentials(Section):
    """Credentials as PEM text, in the private configuration of a process."""

    authority: str
    """Certificate of the job's authority."""
    certificate: str = ""
    """Certificate of this process; empty: it joins, and has none yet."""
    key: str = Field(default="", repr=False)
    """Private key of this process."""

    @property
    def name(self) -> PeerName:
        """The name in its certificate. Raises WrongPeer for one that is damaged."""
        return certificates.name_of(certificates.load(self.certificate))

    def peer(self, role: PeerRole, number: int) -> PeerName:
        """The name of another process of the same generation."""
        mine = self.name
        return PeerName(mine.job, mine.generation, role, number)
