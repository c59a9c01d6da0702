"""Roles, in order: each includes all rights of those below it. The routes declare which role they need."""

from dataclasses import dataclass
from enum import IntEnum

ANONYMOUS = "anonymous"
"""Name of a caller without a token."""


class Role(IntEnum):
    """The rights of a caller, comparable: `Role.VIEWER < Role.ADMIN`."""

    VIEWER = 1
    """Reads everything that holds no secret."""
    OPERATOR = 2
    """Also acts on existing jobs."""
    ADMIN = 3
    """Also creates and deletes jobs, manages tokens, reads the audit log."""

    @property
    def word(self) -> str:
        """The role as text: "viewer"."""
        return self.name.lower()

    @classmethod
    def of(cls, word: str) -> "Role":
        """The role named `word`. Raises ValueError that lists the roles."""
        for role in cls:
            if role.word == word:
                return role
        raise ValueError(f"no role {word!r}; there are {', '.join(role.word for role in cls)}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    name: str
    """The token's name; "anonymous" without one."""
    role: Role | None
    """None: this caller has no rights."""
