"""Addresses of this machine's network interfaces, as Linux knows them."""

import fcntl
import os
import socket
import struct

from millrace.address import LOOPBACK
from millrace.errors import SpecError

LOOPBACK_INTERFACE = "lo"
"""The interface of this machine alone."""
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MAX_NAME_BYTES = 15  # IFNAMSIZ, less a final zero


def address_of(interface: str) -> str:
    """The IPv4 address of an interface. Raises SpecError where it is not there or has none."""
    if interface == LOOPBACK_INTERFACE:
        return LOOPBACK
    name = interface.encode()
    if len(name) <= _MAX_NAME_BYTES:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name))
                return socket.inet_ntoa(found[20:24])
            except OSError:
                pass
    known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
    raise SpecError(
        f"{interface!r} is no interface with an IPv4 address on {os.uname().nodename}; there are: {known}",
        "cluster.interface",
    )
