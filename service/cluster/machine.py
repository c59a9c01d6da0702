"""This machine, as agents and their launcher know it."""

import hashlib
import os
import socket
from pathlib import Path

NAMESPACES = ("mnt", "net")
"""Kinds of Linux namespaces that make a machine of their own: other files, or other addresses."""


def machine_id() -> str:
    """The same for all processes that share files and addresses; different in another container."""
    parts = [socket.gethostname(), _text(Path("/proc/sys/kernel/random/boot_id"))]
    parts += [_link(f"/proc/self/ns/{kind}") for kind in NAMESPACES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
