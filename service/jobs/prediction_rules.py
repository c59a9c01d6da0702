"""Checks a prediction that is requested over the API: its paths, its brokers and its number of processes.

An operator may request it, who is no admin. So it may do less than a job's spec: it reaches no folder and no store of a
job, and uses the job's credentials with the job's brokers only (see trainer.predict.prediction_plan).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.dataset.sources.kafka import KafkaSource
from headrace.errors import SpecError
from headrace.service.auth.allowed_paths import reserved_by_jobs
from headrace.service.auth.config import AllowSection
from headrace.service.auth.spec_rules import SpecRules, check_spec
from headrace.service.jobs.config import LimitsSection
from headrace.service.jobs.host import HostedJob
from headrace.service.spec.job import LoadedJob
from headrace.trainer.config import TrainerJob
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.prediction_plan import own_source, servers_of, source_config


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRules:
    """The settings of the service that limit predictions."""

    allow: AllowSection
    limits: LimitsSection
    private: tuple[Path, ...]
    """Paths that no request may reach, even below an allowed root."""

    def check(
        self, asked: PredictionRequest, job: LoadedJob, jobs: Iterable[HostedJob], hosted: HostedJob | None
    ) -> SpecRules:
        """The rules for the files of its input. Raise SpecError where `asked` names something that is not allowed.

        `asked` has absolute paths. `job` says how events are read. `hosted` is the job of the request, None where the
        request brings a spec. Check again when the prediction starts.
        """
        if asked.on != "here":
            raise SpecError("a service predicts on its machine; use `headrace predict --on cluster` at the head", "on")
        check_workers(asked, self.limits)
        reserved = reserved_by_jobs((each.name, each.spec, each.base, each.store) for each in jobs)
        own = None if hosted is None or self._is_private(hosted.folder) else hosted.folder
        if hosted is None:
            check_spec(job, self.allow, own, self.private, reserved)
        allowed = SpecRules(self.allow, own, self.private, reserved)
        allowed.check(asked, job.folder)
        check_brokers(asked, job.spec, own_brokers=hosted is not None, allow=self.allow)
        return allowed

    def _is_private(self, folder: Path) -> bool:
        folder = folder.resolve()
        return any(folder == path or path in folder.parents for path in map(Path.resolve, self.private))


def check_workers(asked: PredictionRequest, limits: LimitsSection) -> None:
    """Raise SpecError where the request wants more processes than one prediction may have."""
    number, most = asked.trainers + asked.num_shards, limits.prediction_workers
    if number > most:
        message = f"{asked.trainers} trainers and {asked.num_shards} shards are {number} processes; at most {most}"
        raise SpecError(f"{message} are allowed (limits.prediction_workers of the service)", "trainers")


def check_brokers(asked: PredictionRequest, job: TrainerJob, *, own_brokers: bool, allow: AllowSection) -> None:
    """Raise SpecError where the request names brokers that are neither the hosted job's nor allowed by name."""
    if allow.bootstrap_servers is not None or asked.input.kafka is None:
        return  # a list of brokers is checked with all other options
    source = own_source(asked.input, job)
    known = servers_of(source.options) if own_brokers and isinstance(source, KafkaSource) else frozenset()
    config = source_config(asked.input, job)
    assert isinstance(config, KafkaSource), "checked"
    if other := sorted(servers_of(config.options) - known):
        message = f"{other[0]!r} is not a broker of the job; known: {', '.join(sorted(known)) or 'none'}"
        raise SpecError(
            f"{message}; the service's owner can allow others in allow.bootstrap_servers",
            "input.kafka.options.bootstrap_servers",
        )
