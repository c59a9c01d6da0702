"""Addresses of this machine's network interfaces, as Linux knows them."""

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from headrace.address import LOOPBACK
from headrace.errors import SpecError

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
