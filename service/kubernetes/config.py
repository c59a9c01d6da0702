"""Settings of the manifests of a job that are not in its job file."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import headrace

if TYPE_CHECKING:  # the help of a command needs no pydantic
    from headrace.service.kubernetes.pod_settings import PodSettings

IMAGE = f"headrace:{headrace.__version__}"
"""The image of deploy/Dockerfile."""


def _no_settings() -> "PodSettings":
    from headrace.service.kubernetes.pod_settings import PodSettings

    return PodSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSettings:
    """Secrets are named, never read: `kubectl create secret` makes them."""

    image: str = IMAGE
    namespace: str = "default"
    identity_secret: str = ""
    """Secret with the files of the folder `identity` of the job's store; default: NAME-identity."""
    environment_secret: str = ""
    """Secret whose keys become variables of the environment, such as AWS_ACCESS_KEY_ID; default: NAME-environment."""
    replicas: int = 0
    """Pods that serve predictions of the newest version."""
    metrics_from: str | None = None
    """Namespace whose pods may read the figures of the training. None: no pod may."""
    queue: str | None = None
    """Queue of Volcano: all pods of the job start together or none. None: the cluster's own scheduler."""
    pods: "PodSettings" = field(default_factory=_no_settings)
    """The file of the pods."""
