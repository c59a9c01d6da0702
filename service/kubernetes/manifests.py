"""Manifests of a job as YAML: the same job and settings give the same text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from headrace.errors import SpecError
from headrace.service.kubernetes import network
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.job_files import job_files, keys_of
from headrace.service.kubernetes.pods import Part
from headrace.service.kubernetes.requirements import check_renderable
from headrace.service.kubernetes.workloads import JobManifests
from headrace.service.spec.job import load_job


def render_job(path: Path, overrides: Sequence[str], settings: ManifestSettings) -> dict[str, str]:
    """The text of each object by the name of its file, in the order in which they are applied. Raises SpecError."""
    if named := [each for each in overrides if each.startswith("@")]:
        raise SpecError(f"{named[0]} is a file that pods do not have, and its content may be secret", "--set")
    job = load_job(path, overrides)
    name = job.spec.name
    settings = replace(
        settings,
        identity_secret=settings.identity_secret or f"{name}-identity",
        environment_secret=settings.environment_secret or f"{name}-environment",
    )
    check_renderable(job, settings)
    made = JobManifests(job, settings, job_files(job, path), tuple(overrides))
    return {f"{number:02}-{_file_name(each)}": yaml_text(each) for number, each in enumerate(objects(made), 1)}


def objects(made: JobManifests) -> list[Part]:
    """All objects. Policies come before the pods, so that no pod is open for a moment."""
    texts = {key: made.files[path] for path, key in keys_of(made.files).items()}
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": made.metadata(f"{made.name}-job"), "data": texts}
    before = [files, *network.policies(made), *network.services(made), *network.disruption_budgets(made)]
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
