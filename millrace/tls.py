"""Certificates by file: whether a server may be given them. What it says with them is its own business."""

import os
import ssl
import stat
from pathlib import Path

from millrace.errors import SpecError


def check_tls(cert: Path, key: Path, at: tuple[str, str] = ("tls.cert", "tls.key")) -> None:
    """Raise SpecError where the files cannot be read, do not belong together, or the key is there for all to read.

    `at`: by which keys, or options, the two were named.
    """
    for path, name in zip((cert, key), at, strict=True):
        if not path.is_file() or not os.access(path, os.R_OK):
            raise SpecError(f"{path}: no such file, or it may not be read", name)
    if key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise SpecError(f"{key} may be read or written by everybody on this machine: chmod 600 {key}", at[1])
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: b"")  # never asks a terminal
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SpecError(f"{cert} and {key} are no certificate with its key: {reason}", at[0]) from None
