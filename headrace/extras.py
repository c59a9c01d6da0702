"""Libraries that only some commands need; each comes with an extra of the distribution, as in headrace[kafka].

A module that imports one of them at its top is imported late, behind `require`.
"""

from collections.abc import Mapping
from importlib.util import find_spec

from headrace.errors import SpecError

LIBRARIES: Mapping[str, tuple[str, str]] = {
    "confluent_kafka": ("confluent-kafka", "kafka"),
    "fastavro": ("fastavro", "avro"),
    "kafka": ("kafka-python", "kafka"),
    "nicegui": ("NiceGUI", "ui"),
    "psycopg": ("psycopg", "postgres"),
    "ray": ("Ray", "ray"),
    "tensorboard": ("TensorBoard", "tensorboard"),
    "torch": ("PyTorch", "train"),
}
"""By the name of a module: the library's name, and the extra that brings it."""


def is_installed(module: str) -> bool:
    """Whether a module can be found. It is not imported. A folder of this name without code is no module."""
    found = find_spec(module)
    return found is not None and found.origin is not None


def missing(module: str, user: str) -> str:
    """Why `user` ("training") cannot work here, and the command that helps; empty where its library is installed."""
    library, extra = LIBRARIES[module]
    if is_installed(module):
        return ""
    return f"{user} needs {library}, which is not installed: pip install 'headrace[{extra}]'"


def require(module: str, user: str, path: str = "") -> None:
    """Raise SpecError, for the key at `path`, where the library that `user` ("training") needs is not installed."""
    if problem := missing(module, user):
        raise SpecError(problem, path)
