"""Addresses of the form host:port, and which hosts mean this machine alone.

Nothing is looked up or bound here; headrace.http.listening binds.
"""

import ipaddress
import re

LOOPBACK = "127.0.0.1"
LOCAL_NAMES = (LOOPBACK, "localhost", "::1")
"""Names under which a server on loopback always answers: a page of another site cannot reach it by its own name."""
MAX_PORT = 65535
_HOST = re.compile(r"(?:\[([^\[\]/?#@\s]+)\]|([^\[\]:/?#@\s]+))(?::\d{0,5})?", re.ASCII)


def parse_address(text: str, example: str = f"{LOOPBACK}:8080") -> tuple[str, int]:
    """Host, without the brackets of an IPv6 address, and port. Raises ValueError, which shows the `example`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise ValueError(f"{text!r} is not of the form {example}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"{format_host(host)}:{port}"


def format_host(host: str) -> str:
    """The host as it is in front of a port: an IPv6 address has brackets."""
    return f"[{host}]" if is_ipv6(host) else host


def is_ipv6(host: str) -> bool:
    """Whether `host` is an IPv6 address."""
    return ":" in host


def host_of(header: str) -> str:
    """The name in a request's Host header, in lower case, without port and brackets; "" for what is no host."""
    found = _HOST.fullmatch(header)
    return "" if found is None else (found[1] or found[2]).lower()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than localhost could mean anything."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether `host` means all addresses of this machine, such as 0.0.0.0."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def network_of(address: str) -> str:
    """The unit in which clients are counted: an IPv4 address, or the 64-bit network of an IPv6 address.

    One user usually has such a whole IPv6 network.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
