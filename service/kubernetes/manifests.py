"""Manifests of a job as YAML: the same job and settings give the same text."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from headrace.errors import SpecError
from headrace.service.kubernetes import network
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.job_files import job_files
from headrace.service.kubernetes.naming import Named
from headrace.service.kubernetes.pods import Part
from headrace.service.kubernetes.prediction_pod import PredictionRun, check_prediction, prediction_objects
from headrace.service.kubernetes.requirements import (
    MAX_JOB,
    MAX_NAME,
    check_containers,
    check_names,
    check_renderable,
)
from headrace.service.kubernetes.service_pod import ServiceRun, check_service, service_objects
from headrace.service.kubernetes.workloads import JobManifests
from headrace.service.spec.job import LoadedJob, load_job


def render_job(path: Path, overrides: Sequence[str], settings: ManifestSettings) -> dict[str, str]:
    """The text of each object by the name of its file, in the order in which they are applied. Raises SpecError."""
    job, settings = _loaded(path, overrides, settings)
    check_renderable(job, settings)
    return _texts(objects(JobManifests(job.spec.name, settings, job, job_files(job, path), tuple(overrides))))


def render_prediction(
    path: Path, overrides: Sequence[str], settings: ManifestSettings, run: PredictionRun
) -> dict[str, str]:
    """The same for one run of `headrace predict`."""
    job, settings = _loaded(path, overrides, settings)
    check_names(job.spec.name, settings, [("--name", run.name)])
    if (length := len(f"{job.spec.name}-{run.name}")) > MAX_JOB:
        raise SpecError(
            f"{run.name!r} makes with the job's name a Job's name of {length} characters, and {MAX_JOB} is the "
            "longest; name it shorter",
            "--name",
        )
    check_containers(job)
    made = JobManifests(job.spec.name, settings, job, job_files(job, path), tuple(overrides))
    check_prediction(made, run)
    return _texts(prediction_objects(made, run))


def render_service(name: str, settings: ManifestSettings, run: ServiceRun) -> dict[str, str]:
    """The same for a service."""
    settings = replace(settings, environment_secret=settings.environment_secret or f"{name}-environment")
    check_names(name, settings, [("--replicas", job) for job in run.replicas], key="--name")
    if long := next((job for job in run.replicas if len(f"{name}-{job}-replica") > MAX_NAME), None):
        raise SpecError(
            f"{long!r} makes a name of more than {MAX_NAME} characters; choose a shorter --name", "--replicas"
        )
    made = Named(name, settings)
    check_service(made, run)
    return _texts(service_objects(made, run))


def _loaded(path: Path, overrides: Sequence[str], settings: ManifestSettings) -> tuple[LoadedJob, ManifestSettings]:
    """The job, and the settings with the default names of its Secrets."""
    if named := [each for each in overrides if each.startswith("@")]:
        raise SpecError(f"{named[0]} is a file that pods do not have, and its content may be secret", "--set")
    job = load_job(path, overrides)
    name = job.spec.name
    return job, replace(
        settings,
        identity_secret=settings.identity_secret or f"{name}-identity",
        environment_secret=settings.environment_secret or f"{name}-environment",
    )


def _texts(made: Iterable[Part]) -> dict[str, str]:
    return {f"{number:02}-{_file_name(each)}": yaml_text(each) for number, each in enumerate(made, 1)}


def objects(made: JobManifests) -> list[Part]:
    """All objects. Policies come before the pods, so that no pod is open for a moment."""
    before = [
        made.files_map(f"{made.name}-job"),
        *made.claims(),
        *network.policies(made),
        *network.services(made),
        *network.disruption_budgets(made),
    ]
    return [*before, *network.pod_groups(made), *made.workloads()]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and each list in full."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_node)


def yaml_text(data: Part) -> str:
    """An object as YAML; keys keep their order."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))


def _file_name(made: Part) -> str:
    return f"{made['kind'].lower()}-{made['metadata']['name']}.yaml"
