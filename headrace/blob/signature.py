"""Signatures of small blobs by a key of the job: a store's writer without the key can neither make nor change them.

A signed blob is its content and one more line, `hmac-sha256 <hex>` (RFC 2104). The signature covers the job's name and
the blob's key, too, so that no blob passes for another one. It does not show that a blob was removed, or that an older
one of the same key is back.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from headrace.errors import HeadraceError, SpecError
from headrace.secrets import resolve_secret

KEY = "store.key"
"""Key of the job file that names the key."""
MIN_LETTERS = 32
"""Shortest key: one that nobody finds by trying."""
_LINE = re.compile(rb"\nhmac-sha256 ([0-9a-f]{64})\n\Z")


class WrongSignature(HeadraceError):
    """A blob is not signed as the job file says."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Signs and checks the blobs of one job; without a key it leaves them as they are."""

    job: str = ""
    key: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, reference: Mapping[str, str] | None, job: str, folder: Path) -> Self:
        """With the key that `reference` names, a file of it relative to `folder`. Raises SpecError."""
        if reference is None:
            return cls(job)
        key = str(resolve_secret(reference, folder, KEY))
        if len(key) < MIN_LETTERS:
            raise SpecError(
                f"names a key of {len(key)} letters; {MIN_LETTERS} are the least: `openssl rand -hex 32` makes one", KEY
            )
        return cls(job, key.encode())

    def signed(self, at: str, content: bytes) -> bytes:
        """The blob with `content` for the key `at`."""
        return content + b"\nhmac-sha256 %s\n" % self._sign(at, content) if self.key else content

    def opened(self, at: str, blob: bytes) -> bytes:
        """The content of the blob that was found at the key `at`. Raises WrongSignature."""
        line = _LINE.search(blob, max(0, len(blob) - 128))
        if line is None and not self.key:
            return blob
        if line is None:
            raise WrongSignature(
                f"{at} is not signed, and the job file has {KEY}: somebody without the key wrote it, or it was written "
                "before the job had one; a signed job begins with a prefix of its own"
            )
        if not self.key:
            raise WrongSignature(f"{at} is signed, and the job file has no {KEY}: name the key that the job had")
        content = blob[: line.start()]
        if not hmac.compare_digest(line[1], self._sign(at, content)):
            raise WrongSignature(
                f"{at} has a wrong signature: it was changed, is of another job, or {KEY} is another key"
            )
        return content

    def _sign(self, at: str, content: bytes) -> bytes:
        named = b"\0".join((b"headrace-1", self.job.encode(), at.encode(), content))
        return hmac.new(self.key, named, hashlib.sha256).hexdigest().encode()


UNSIGNED = Signature()
