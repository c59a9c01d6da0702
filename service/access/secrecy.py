"""What of a spec nobody is shown: passwords that it must hold, as Kafka's."""

from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
SECRET_KEYS = frozenset({"sasl_plain_password", "ssl_password", "sasl_plain_username", "proxy_url", "socks5_proxy"})
"""Keys whose values are secrets wherever they stand."""


def without_secrets(raw: Any) -> Any:
    """`raw`, a spec or a part of one, with "***" in place of every secret in it."""
    if isinstance(raw, Mapping):
        return {key: HIDDEN if key in SECRET_KEYS else without_secrets(value) for key, value in raw.items()}
    if isinstance(raw, list | tuple):
        return [without_secrets(part) for part in raw]
    return raw
