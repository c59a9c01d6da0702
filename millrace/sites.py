"""Whether a page of another site has its reader's browser ask."""

from collections.abc import Sequence
from urllib.parse import urlsplit

SAME_SITE = ("none", "same-origin")
"""`Sec-Fetch-Site` of what no page of another site asks; programs that are no browsers do not send it."""


def is_another_sites(host: str | None, origins: Sequence[str], fetch_sites: Sequence[str]) -> bool:
    """By the request's headers Host, Origin and Sec-Fetch-Site; older browsers send no Sec-Fetch-Site."""
    return any(_place(origin) != host for origin in origins) or any(each not in SAME_SITE for each in fetch_sites)


def _place(origin: str) -> str:
    """Host and port; empty where it tells none, as "null" does."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # a bracket that is not closed
        return ""
