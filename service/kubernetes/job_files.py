"""The small files of a job that its pods need: job file, generator, own model. They travel in one ConfigMap."""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from headrace.errors import SpecError
from headrace.service.cluster.machine import absent_of_pipe, model_files, named_by_pipe
from headrace.service.spec.job import LoadedJob

JOB_FILE = "job.toml"
MAX_BYTES = 900 << 10
"""Most bytes of all files together: the API server takes objects of up to 1 MiB. Larger ones belong into the image."""


def job_files(job: LoadedJob, path: Path) -> dict[str, str]:
    """The text of each file by its path relative to the job's folder; `path` is that of the job file.

    Raises SpecError for files that do not fit.
    """
    for key, name in absent_of_pipe(job):
        raise SpecError(
            f"{name!r} is not in {job.folder}, so pods would not have it: put it there, or into the image, named by "
            "its absolute path",
            key,
        )
    found = {JOB_FILE: _text(path, JOB_FILE)}
    for name in _beside(job):
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or name == JOB_FILE:
            raise SpecError(f"{name}: is outside of the job file's folder; put it there, or into the image", "pipe")
        found[name] = _text(job.folder / name, name)
    if (size := sum(len(text.encode()) for text in found.values())) > MAX_BYTES:
        raise SpecError(
            f"{', '.join(found)}: {size:,} bytes; a ConfigMap has room for {MAX_BYTES:,}: put large files into the "
            "image, and name them by absolute paths"
        )
    return found


def keys_of(files: Mapping[str, str]) -> dict[str, str]:
    """The key of each file in the ConfigMap, by its path: keys have no slashes. Raises SpecError for two of one key."""
    keys = {name: name.replace("/", "__") for name in files}
    if len(set(keys.values())) < len(keys):
        raise SpecError(f"{', '.join(files)}: two of them have one name in a ConfigMap, where / is __; rename one")
    return keys


def _beside(job: LoadedJob) -> Iterator[str]:
    """Files that the spec names and that are in its folder, each once."""
    classes = [each for each in (job.spec.model.class_path, *job.spec.metrics.own) if each and ":" in each]
    names = [*named_by_pipe(job), *(name for each in classes for name in model_files(job.folder, each))]
    for name in dict.fromkeys(names):
        if name.endswith("/__init__.py"):
            raise SpecError(f"{name}: a package does not travel in a ConfigMap; install it in the image", "model.class")
        yield name


def _text(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{name}: cannot be read as text ({error}); put it into the image") from None
