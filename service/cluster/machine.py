"""This machine, as agents and their launcher know it."""

import hashlib
import math
import os
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from headrace.dataset.spec.config import PipeSection
from headrace.service.spec.job import LoadedJob

MACHINE = "HEADRACE_MACHINE"
"""Variable of the environment by which an orchestrator names the machine, where the system does not tell it: containers
of one pod share addresses and the store, and have file systems of their own."""
NAMESPACES = ("mnt", "net")
"""Kinds of Linux namespaces that make a machine of their own: other files, or other addresses."""

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Processor time that a container may use: microseconds, or "max", and the period in microseconds."""


def cores_here(quota: Path = QUOTA) -> int:
    """Cores that this process may use, as far as a container's limit of processor time allows; at least 1."""
    cores = len(os.sched_getaffinity(0))
    used, _, period = _text(quota).partition(" ")
    return max(1, min(cores, math.ceil(int(used) / int(period)))) if used.isdecimal() and period.isdecimal() else cores


def machine_id() -> str:
    """The same for all processes that share files and addresses; different in another container."""
    if named := os.environ.get(MACHINE):
        return hashlib.sha256(f"{MACHINE}={named}".encode()).hexdigest()[:16]
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


# The files that trainers and readers read: each machine must have the same ones. headrace.shared_folder compares them.

SCRIPTS = (".py", ".sh", ".pl", ".rb", ".js", ".lua", ".R", ".awk")
"""Ends of names of programs' texts."""
MAX_SOURCE_FILES = 64
"""Most files of a source that are compared: the first ones in their order."""


def input_files(job: LoadedJob) -> list[str]:
    """Files that a trainer reads, relative to the job's folder: of the user's model, and without readers of the pipe
    and of the source."""
    stream = [] if job.cluster.readers else stream_files(job)
    return list(dict.fromkeys([*stream, *model_files(job.folder, job.spec.model.class_path or "")]))


def stream_files(job: LoadedJob) -> Iterator[str]:
    """Files of the pipe and of the source, relative to the job's folder."""
    yield from named_by_pipe(job)
    for source in job.spec.sources.values():
        yield from islice(source.local_files(job.folder), MAX_SOURCE_FILES)


def named_by_pipe(job: LoadedJob) -> Iterator[str]:
    """Arguments of the pipe command, or the schema of events, that are files of the job's folder."""
    pipe = job.spec.pipe
    for word in pipe.command if isinstance(pipe, PipeSection) else filter(None, [pipe.schema_file]):
        if not Path(word).is_absolute() and (job.folder / word).is_file():
            yield word


def absent_of_pipe(job: LoadedJob) -> Iterator[tuple[str, str]]:
    """Files of the job's folder that the pipe names and that are not there: the path of the key, and the file."""
    pipe = job.spec.pipe
    if not isinstance(pipe, PipeSection):
        named = [("pipe.schema_file", pipe.schema_file)] if pipe.schema_file else []
    else:
        named = [(f"pipe.command.{number}", word) for number, word in enumerate(pipe.command) if _is_script(word)]
    for key, name in named:
        if not Path(name).is_absolute() and not (job.folder / name).is_file():
            yield key, name


def _is_script(word: str) -> bool:
    """Whether a word of a command is the name of a program's text, as far as words tell."""
    return not word.startswith("-") and Path(word).suffix in SCRIPTS


def model_files(folder: Path, class_path: str) -> Iterator[str]:
    """The module of a user's class in the job's folder: a file, or a package."""
    module, _, _ = class_path.partition(":")
    path = module.replace(".", "/")
    yield from (name for name in (f"{path}.py", f"{path}/__init__.py") if module and (folder / name).is_file())
