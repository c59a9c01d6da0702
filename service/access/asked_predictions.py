"""What a prediction that somebody asks for may name, and how much it may take: its job's brokers, no more processes.

Who asks is an operator, and no admin. So it is held to more than a spec is: it reaches no folder of a job and no store,
and has the job's credentials for the job's brokers only (trainer.predict.plan sees to that).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dataset.config import KafkaSource
from millrace.errors import SpecError
from service.access.allowed import Allowed, check_spec
from service.access.config import AllowSection
from service.access.confines import reserved_by_jobs
from service.hosting.config import LimitsSection
from service.hosting.host import HostedJob
from service.spec import LoadedJob
from trainer.config import TrainerJob
from trainer.predict.config import PredictionRequest
from trainer.predict.plan import servers_of, source_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the service's owner has written that predictions are held to."""

    allow: AllowSection
    limits: LimitsSection
    private: tuple[Path, ...]
    """What nobody may reach, be it below an allowed root."""

    def check(
        self, asked: PredictionRequest, job: LoadedJob, jobs: Iterable[HostedJob], hosted: HostedJob | None
    ) -> Allowed:
        """Raise SpecError where `asked`, placed, names what is not allowed; what may be named, for its files.

        `job` is what events are read by; `hosted` the job that is asked for it, None where the request brings a spec.
        To be asked again when it is begun.
        """
        check_workers(asked, self.limits)
        reserved = reserved_by_jobs((each.name, each.spec, each.base, each.store) for each in jobs)
        own = None if hosted is None or self._is_private(hosted.folder) else hosted.folder
        if hosted is None:
            check_spec(job, self.allow, own, self.private, reserved)
        allowed = Allowed(self.allow, own, self.private, reserved)
        allowed.check(asked, job.folder)
        check_brokers(asked, job.spec, own_brokers=hosted is not None, allow=self.allow)
        return allowed

    def _is_private(self, folder: Path) -> bool:
        folder = folder.resolve()
        return any(folder == path or path in folder.parents for path in map(Path.resolve, self.private))


def check_workers(asked: PredictionRequest, limits: LimitsSection) -> None:
    """Raise SpecError where it asks for more processes than one prediction may have."""
    number, most = asked.trainers + asked.num_shards, limits.prediction_workers
    if number > most:
        told = f"{asked.trainers} trainers and {asked.num_shards} shards are {number} processes; at most {most} may be"
        raise SpecError(f"{told} (limits.prediction_workers of the service)", "trainers")


def check_brokers(asked: PredictionRequest, job: TrainerJob, *, own_brokers: bool, allow: AllowSection) -> None:
    """Raise SpecError where it would connect to brokers that are neither the hosted job's nor allowed by name."""
    if allow.bootstrap_servers is not None or asked.input.kafka is None:
        return  # those of a list are checked with all options
    source = next(iter(job.sources.values()))
    known = servers_of(source.options) if own_brokers and isinstance(source, KafkaSource) else frozenset()
    config = source_config(asked.input, job)
    assert isinstance(config, KafkaSource), "checked"
    if other := sorted(servers_of(config.options) - known):
        told = f"{other[0]!r} is no broker of the job; known: {', '.join(sorted(known)) or 'none'}"
        raise SpecError(
            f"{told}; the service's owner names others in allow.bootstrap_servers",
            "input.kafka.options.bootstrap_servers",
        )
