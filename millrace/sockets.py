"""Unix sockets that only their owner may use, as gRPC names them, whatever the length of their paths.

A socket's address has room for a path of 107 bytes (`sockaddr_un`). A longer path is named by a descriptor of its
folder below /proc/self/fd, which must stay open as long as the name is used.
"""

import os
from pathlib import Path

SCHEME = "unix:"
"""Begins the address of a unix socket; every other address is host:port."""
MAX_PATH_BYTES = 107
"""Of `sun_path`, which has 108 with the zero at its end."""
OWNER_ONLY = 0o600
"""On Linux, connecting needs leave to write to the socket's file."""


def beside(address_file: Path) -> Path:
    """The socket of the process that writes `address_file`: its neighbour, in the same private folder."""
    return address_file.absolute().with_suffix(".socket")


def address_of(path: Path) -> str:
    """What others are told of the socket at `path`."""
    return f"{SCHEME}{path}"


def target_of(address: str) -> tuple[str, int | None]:
    """What gRPC is to be told of `address`, and a descriptor to close once that name is no longer used, if any.

    Raises OSError where the folder of a unix socket cannot be opened.
    """
    path = address.removeprefix(SCHEME)
    if path == address or len(os.fsencode(path)) <= MAX_PATH_BYTES:
        return address, None
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    return f"{SCHEME}/proc/self/fd/{descriptor}/{name}", descriptor
