"""Roles, in order: who may do more may do all that the others may. Which route asks for which role, the routes say."""

from dataclasses import dataclass
from enum import IntEnum

ANONYMOUS = "anonymous"
"""Name of a caller without a token."""


class Role(IntEnum):
    """What a caller may do here; it compares: `Role.VIEWER < Role.ADMIN`."""

    VIEWER = 1
    """Reads what holds no secret."""
    OPERATOR = 2
    """Acts on jobs that are there, also."""
    ADMIN = 3
    """Creates and deletes jobs, gives tokens, reads the audit log, also."""

    @property
    def word(self) -> str:
        """As people write it: "viewer"."""
        return self.name.lower()

    @classmethod
    def of(cls, word: str) -> "Role":
        """The role that people call `word`. Raises ValueError naming those there are."""
        for role in cls:
            if role.word == word:
                return role
        raise ValueError(f"no role {word!r}; there are {', '.join(role.word for role in cls)}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    name: str
    """The token's name; "anonymous" without one."""
    role: Role | None
    """None: nobody gave this caller a role."""
