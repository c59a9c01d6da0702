"""Addresses of the form host:port, and which hosts mean this machine alone.

Nothing is looked up or bound here; headrace.http.listening binds.
"""

import fcntl
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path

from headrace.errors import SpecError

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


# Addresses of this machine's network interfaces, as Linux knows them.

LOOPBACK_INTERFACE = "lo"
"""The interface of this machine alone."""
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MAX_NAME_BYTES = 15  # IFNAMSIZ, less a final zero
_IPV6 = Path("/proc/net/if_inet6")
_GLOBAL = 0  # scope: not the link, not this machine


def address_of(interface: str) -> str:
    """The address of an interface: of IPv4, or where it has none of IPv6, but none that is valid on its link alone.

    Raises SpecError where the interface is not there, or has no address.
    """
    if interface == LOOPBACK_INTERFACE:
        return LOOPBACK
    name = interface.encode()
    if len(name) <= _MAX_NAME_BYTES:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name))
                return socket.inet_ntoa(found[20:24])
            except OSError:
                if of_ipv6 := _ipv6_of(interface):
                    return of_ipv6
    known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
    raise SpecError(
        f"{interface!r} is no interface with an address on {os.uname().nodename}; there are: {known}",
        "cluster.interface",
    )


def _ipv6_of(interface: str) -> str:
    """The first IPv6 address of an interface that other links reach; nothing where there is none."""
    lines = _IPV6.read_text().splitlines() if _IPV6.exists() else []
    for digits, _index, _prefix, scope, _flags, name in map(str.split, lines):
        if name == interface and int(scope, 16) == _GLOBAL:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""
