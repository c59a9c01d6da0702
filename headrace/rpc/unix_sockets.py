"""Unix sockets for their owner only: addresses for gRPC and ZeroMQ, for paths of any length.

A socket's address has room for a path of 107 bytes (`sockaddr_un`). A longer path is given by a descriptor of its
folder below /proc/self/fd, which must stay open while the name is used.
"""

import os
from pathlib import Path

SCHEME = "unix:"
"""Prefix of a unix socket's address; every other address is host:port."""
MAX_PATH_BYTES = 107
"""Longest path in `sun_path`, which has 108 bytes including a final zero."""
OWNER_ONLY = 0o600
"""Mode of a socket's file. On Linux, connecting needs write permission."""


def beside(address_file: Path) -> Path:
    """The socket of the process that writes `address_file`, in the same private folder."""
    return address_file.absolute().with_suffix(".socket")


def address_of(path: Path) -> str:
    """The address of the socket at `path`."""
    return f"{SCHEME}{path}"


def target_of(address: str) -> tuple[str, int | None]:
    """The target for gRPC of `address`, and a descriptor, if any, to close once the target is no longer used.

    Raises OSError where the folder of a unix socket cannot be opened.
    """
    path = address.removeprefix(SCHEME)
    if path == address or len(os.fsencode(path)) <= MAX_PATH_BYTES:
        return address, None
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    return f"{SCHEME}/proc/self/fd/{descriptor}/{name}", descriptor
