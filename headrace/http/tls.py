"""Checks certificate files before a server uses them."""

import os
import ssl
import stat
from pathlib import Path

from headrace.errors import SpecError


def check_tls(cert: Path, key: Path, at: tuple[str, str] = ("tls.cert", "tls.key")) -> None:
    """Raise SpecError if the files cannot be read, do not belong together, or the key is readable by everybody.

    `at`: the keys or options that name the two files.
    """
    for path, name in zip((cert, key), at, strict=True):
        if not path.is_file() or not os.access(path, os.R_OK):
            raise SpecError(f"{path}: no such file, or it is not readable", name)
    if key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise SpecError(f"{key} may be read or written by everybody on this machine: chmod 600 {key}", at[1])
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: b"")  # never asks a terminal
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SpecError(f"{cert} and {key} are not a certificate and its key: {reason}", at[0]) from None
