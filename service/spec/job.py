"""The job spec: composes the sections that the packages declare, and loads a spec from its file.

Each section checks itself; service.spec.references checks them against each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from headrace import documents
from headrace.config import load_toml, validate
from headrace.errors import SpecError
from headrace.secrets import check_shown, secrets_of, with_secrets, with_secrets_of, without_secrets
from headrace.service.spec.config import ClusterSection
from headrace.service.spec.left_out import without_left_out
from headrace.service.spec.references import check_places, check_references
from headrace.text_kinds import TextKind
from headrace.trainer.config import NEWEST_DEFAULTS, TrainerJob
from headrace.trainer.predict.after_training import check_after, check_evaluator
from headrace.trainer.predict.config import EvaluatorSection, PredictionRequest
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.spec.device_rules import RowWorkers, check_device_rows
from headrace.validation import naming_entries


class JobFile(TrainerJob, title="Job"):
    """A job file, as a user writes it."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "without": TextKind.NAME,
    }

    cluster: ClusterSection = ClusterSection()
    """The processes of the job."""
    predict: PredictionRequest | None = None
    """The prediction that the newest version makes once the stream has ended and all is trained."""
    evaluator: EvaluatorSection | None = None
    """A process that measures each version on events of its own, beside the trainers (docs/guards.md)."""
    without: tuple[str, ...] = ()
    """Slots that are left out, though the file declares them: the pipe may emit them, the model does not get them. To
    try what a slot is worth; see docs/choosing.md."""


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A spec that has passed every check, with its folders."""

    spec: JobFile
    raw: dict[str, Any]
    """The spec as the user wrote it, with overrides applied and "***" for secrets written in it."""
    folder: Path
    """The spec's folder, absolute: relative paths start there."""
    store: Path
    """The store's folder, absolute; it need not exist."""
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Those secrets, by the path of their key. Only private files of workers may hold them."""
    kernels: Mapping[str, Mapping[str, str]] | None = None
    """The table of kernels that a new store of the job takes from another one; None: by `train.matmul`."""
    ends_after: int | None = None
    """Number of positions after which its stream counts as ended, for a run on the beginning of a stream; None: it has
    its own end, or none."""
    resized: Mapping[str, int] = field(default_factory=dict)
    """The numbers of workers that a resize gave in place of the file's, by the path of their key."""

    @classmethod
    def of(cls, spec: JobFile, whole: Mapping[str, Any], folder: Path, store: Path) -> "LoadedJob":
        """The job of `whole`, a spec with its secrets, which was checked as `spec`."""
        return cls(spec=spec, raw=without_secrets(whole), folder=folder, store=store, secrets=secrets_of(whole))

    def whole(self) -> dict[str, Any]:
        """The spec with its secrets."""
        return dict(with_secrets(self.raw, self.secrets))

    @property
    def cluster(self) -> ClusterSection:
        """Its section `cluster`, with the numbers of workers in force."""
        return self.spec.cluster.resized(self.resized)

    def under(self, logged: Mapping[str, Any], store: Path) -> "LoadedJob":
        """The job under a spec from its log, in `store`. The log has no secrets; the present ones are used."""
        whole = with_secrets_of(logged, self.whole())
        return LoadedJob.of(validate(JobFile, whole), whole, self.folder, store)

    @property
    def full(self) -> dict[str, Any]:
        """The spec with every default written out, as workers, logs and commits have it."""
        cluster = self.spec.cluster.model_dump(mode="json")
        return fill_defaults({**self.raw, "cluster": cluster}, unset=self.spec.defaults or NEWEST_DEFAULTS)


def load_job(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """The job at `path`, with each `a.b=value` of `overrides` in its place. Raises SpecError."""
    return job_of(load_toml(path, overrides), path.resolve().parent)


def job_of(raw: Mapping[str, Any], folder: Path) -> LoadedJob:
    """The job that `raw` describes; its relative paths start at `folder`, an absolute one. Raises SpecError."""
    if documents.value_nested_deeper(raw, documents.MAX_SPEC_DEPTH):
        raise SpecError(f"lists and sections are nested deeper than {documents.MAX_SPEC_DEPTH}")
    raw = without_left_out(raw)
    with naming_entries(raw):
        spec = validate(JobFile, raw)
        check_shown(raw)
        check_references(spec)
        spec.dense.check_trainers(spec.cluster.num_trainers)
        check_elastic(spec)
        check_in_batch(spec)
        check_device_rows(spec, row_workers(spec.cluster))
        if spec.predict is not None:
            check_after(spec.predict, spec)
        check_evaluator(spec.evaluator, spec)
    store = (folder / spec.store.path).resolve()
    check_places(spec, store, folder)
    loaded = LoadedJob.of(spec, raw, folder, store)
    return with_defaults(loaded, spec.defaults or NEWEST_DEFAULTS)


def with_raw(job: LoadedJob, whole: Mapping[str, Any]) -> LoadedJob:
    """The job that `whole`, a text of its file with secrets, describes in the same folder. Raises SpecError."""
    spec = validate(JobFile, whole)
    changed = replace(job, spec=spec, raw=without_secrets(whole), secrets=secrets_of(whole))
    return with_defaults(changed, spec.defaults or NEWEST_DEFAULTS)


def row_workers(cluster: ClusterSection) -> RowWorkers:
    """The workers, as far as rows on devices depend on them."""
    return RowWorkers(
        num_trainers=cluster.num_trainers,
        num_shards=cluster.num_shards,
        elastic=cluster.elastic is not None,
        one_machine=cluster.launcher == "local" and not cluster.leaves_machine,
        wire=cluster.wire,
    )


def check_elastic(spec: JobFile) -> None:
    """Raise SpecError for an elastic number of trainers where another number is another division of the model."""
    if spec.cluster.elastic is not None and spec.dense.strategy == "pipeline":
        raise SpecError(
            'dense.strategy = "pipeline" divides the layers of the model among the trainers, so it needs a fixed '
            "number of them; write one number",
            "cluster.trainers",
        )


def check_in_batch(spec: JobFile) -> None:
    """Raise SpecError for tables whose weights follow events where logits are known in the backward pass alone."""
    for name, table in spec.tables.items():
        if table.in_batch and spec.dense.strategy == "pipeline":
            raise SpecError(
                'does not work with dense.strategy = "pipeline" (logits and gradients are one computation); remove it',
                f"tables.{name}.in_batch",
            )


def with_defaults(job: LoadedJob, number: int) -> LoadedJob:
    """The job with set `number` of the defaults for keys that its file leaves out. Raises SpecError.

    The model's settings stay as written: predictions are identified by them.
    """
    full = {**fill_defaults(job.raw, unset=number), "model": job.raw["model"]}
    return replace(job, spec=validate(JobFile, with_secrets(full, job.secrets)))
