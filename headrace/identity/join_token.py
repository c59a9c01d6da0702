"""The join token of a job: it shows a joining process which authority to trust, and shows the head that it may join.

The token lives until an operator rotates it, since nobody can hand out a new one at every restart. Certificates that
were signed before a rotation stay valid for their generation.
"""

import hmac
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from headrace.durable import check_no_link
from headrace.errors import Refused, SpecError
from headrace.identity.authority import Authority, write_once

FILE = "join_token"
"""The token of a job, in the folder of its authority, for the owner only."""
_FORM = re.compile(r"(?:headrace|millrace)-1\.([0-9a-f]{64})\.([0-9a-f]{64})")  # "millrace": made before 0.2
MAX_BYTES = 1024
"""Longest file with a token."""


class StaleToken(Refused):
    """A token was rotated, or is of another job."""

    def __init__(self) -> None:
        super().__init__(
            "the join token is not valid: it was rotated, or it is of another job; get the present one from the head"
        )


@dataclass(frozen=True, slots=True)
class JoinToken:
    """All that a process needs to join a job."""

    fingerprint: str
    """SHA-256 of the certificate of the job's authority."""
    secret: str = field(repr=False)

    def __str__(self) -> str:
        return f"headrace-1.{self.fingerprint}.{self.secret}"

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """The token in a text. Raises ValueError, which does not show the text."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError("is not a join token, which has the form headrace-1.<fingerprint>.<secret>")
        return cls(match[1], match[2])

    def check(self, given: str) -> None:
        """Raise StaleToken unless `given` is the secret of this token. Takes the same time for every wrong one."""
        if not hmac.compare_digest(given.encode(), self.secret.encode()):
            raise StaleToken()


def open_token(folder: Path, authority: Authority) -> JoinToken:
    """The job's token in `folder`, made if absent. Raises SpecError for a damaged file; Unwritable."""
    path = check_no_link(folder / FILE)
    if not path.exists():
        write_once(path, f"{JoinToken(authority.fingerprint, secrets.token_hex(32))}\n".encode())
    token = read_token(path)
    if token.fingerprint != authority.fingerprint:  # the authority was replaced: its old tokens lead nowhere
        return rotate_token(folder, authority)
    return token


def check_token(path: Path, given: str) -> None:
    """Raise StaleToken unless `given` is the secret of the token that is in a file now."""
    try:
        token = read_token(path)
    except SpecError:  # an operator has removed it, or is replacing it
        raise StaleToken() from None
    token.check(given)


def rotate_token(folder: Path, authority: Authority) -> JoinToken:
    """Replace the job's token: the old one is refused from now on. Raises Unwritable."""
    (folder / FILE).unlink(missing_ok=True)
    write_once(folder / FILE, f"{JoinToken(authority.fingerprint, secrets.token_hex(32))}\n".encode())
    return read_token(folder / FILE)


def read_token(path: Path) -> JoinToken:
    """The token in a file. Raises SpecError."""
    try:
        with path.open("rb") as file:
            return JoinToken.parse(file.read(MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SpecError(f"{path}: {why}; get the token of the job from its head") from None
