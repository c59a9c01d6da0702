"""Tokens that somebody wrote where none belongs, in an address or a body: their secret part is hidden."""

import re
from collections.abc import Mapping
from typing import Any

from millrace.secrecy import HIDDEN

TOKEN = re.compile(r"(mlr_[0-9a-f]{16}_)[0-9a-f]+", re.ASCII | re.IGNORECASE)
"""A token's text, whole or cut; its id may be told, what follows opens something."""


def without_tokens(said: Any) -> Any:
    """JSON, or text, with "***" in place of the secret part of every token in it."""
    if isinstance(said, str):
        return TOKEN.sub(rf"\1{HIDDEN}", said)
    if isinstance(said, Mapping):
        return {without_tokens(key): without_tokens(value) for key, value in said.items()}
    if isinstance(said, list | tuple):
        return [without_tokens(part) for part in said]
    return said
