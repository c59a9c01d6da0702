"""Prepares a pipe command: program, folder, environment. dataset.pipe.process starts it."""

import base64
import importlib.util
import json
import os
import re
import shutil
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.dataset.features.slot_rules import fields_of
from headrace.dataset.spec.config import AnyPipe, PipeSection
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.process import dying_with_parent, user_environment

MAX_SLOTS_BYTES = 100_000
"""Longest HEADRACE_SLOTS; Linux refuses variables above 128 KiB."""
PACKAGES = Path(headrace.__file__).resolve().parents[1]
"""Folder of our package, for PYTHONPATH of a generator that another interpreter runs."""
OLD_NAMES = Path(headrace.__file__).resolve().with_name("dataset") / "old_names"
"""Folder of the name that generators of before version 0.2 import."""

_OLD_IMPORT = re.compile(rb"^\s*(?:from|import)\s+dataset\b", re.MULTILINE)
_MAX_SCRIPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Command:
    """A pipe command, ready to start."""

    words: tuple[str, ...]
    """The command as the user wrote it, for messages."""
    argv: tuple[str, ...]
    folder: Path
    environment: dict[str, str]

    def __str__(self) -> str:
        return " ".join(self.words)


def check_command(config: PipeSection, folder: Path) -> tuple[str, ...]:
    """The argument vector of `pipe.command`. Raises SpecError if it cannot be started in the spec's `folder`."""
    program, *arguments = config.command
    if program == "python":
        found: str | None = sys.executable
        script = next((word for word in arguments if not word.startswith("-")), None)
        if arguments[:1] == [script] and script is not None and not (folder / script).is_file():
            raise SpecError(f"{folder / script}: no such file", "pipe.command")
    elif "/" in program:
        found = str(folder / program)
        if not os.access(found, os.X_OK) or os.path.isdir(found):
            raise SpecError(f"{found}: no such program, or it may not be executed", "pipe.command")
    else:
        found = shutil.which(program)
        if found is None:
            raise SpecError(f"{program!r}: no such program on PATH; give its path, or install it", "pipe.command")
    return (found or program, *arguments)


def check_pipe(config: AnyPipe, schema: Schema, folder: Path) -> None:
    """Raise SpecError if the pipe cannot be started in the spec's `folder`."""
    if isinstance(config, PipeSection):
        prepare_command(config, schema, folder)
    else:
        config.open_decoder(fields_of(config, schema), folder)


def old_name_hint(config: AnyPipe, folder: Path) -> str | None:
    """A hint for a pipe command in the spec's `folder` that uses `dataset`, the old name of our package; else None."""
    if not isinstance(config, PipeSection) or any((folder / name).exists() for name in ("dataset.py", "dataset")):
        return None
    if importlib.util.find_spec("dataset") is not None:  # another distribution's
        return None
    if config.command[1:3] == ("-m", "dataset"):
        return "pipe.command: `-m dataset` is `-m headrace.dataset` now; the old name works in pipe commands only"
    for path in (folder / word for word in config.command):
        if path.is_file() and _OLD_IMPORT.search(_head_of(path)):
            return (
                f"{path} imports `dataset`, now `headrace.dataset`: write `from headrace import DataGenerator`; "
                "the old name works in pipe commands only"
            )
    return None


def _head_of(script: Path) -> bytes:
    with script.open("rb") as file:
        return file.read(_MAX_SCRIPT_BYTES)


def prepare_command(config: PipeSection, schema: Schema, folder: Path, spec: Path | None = None) -> Command:
    """The command with its environment: fixed hash seed, zone and locale, no secrets, the slots for `run()`."""
    environment = user_environment() | {"PYTHONHASHSEED": "0"}
    paths = [str(OLD_NAMES), str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "HEADRACE_PROTOCOL": config.protocol.value}
    if spec is not None:
        environment["HEADRACE_SPEC"] = str(spec.resolve())
    environment |= {"HEADRACE_SLOTS": encode_slots(schema), "HEADRACE_EXTRA": config.extra}
    return Command(config.command, dying_with_parent(check_command(config, folder)), folder, environment)


def encode_slots(schema: Schema) -> str:
    """The slots in order, as JSON; as base64 of its zlib if that is too long. Raises SpecError if both are."""
    slots = json.dumps([slot.shape for slot in schema.slots], separators=(",", ":"))
    if len(slots) > MAX_SLOTS_BYTES:
        slots = base64.b64encode(zlib.compress(slots.encode(), 9)).decode()
    if len(slots) > MAX_SLOTS_BYTES:
        raise SpecError(f"{len(schema.slots)} slots are too many to pass to a pipe command", "slots")
    return slots
