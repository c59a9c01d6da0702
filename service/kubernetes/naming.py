"""Names and labels of the objects of a job or a service, and its PersistentVolumeClaims."""

from dataclasses import dataclass

from headrace.service.kubernetes import pods
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.pods import Part


@dataclass(frozen=True, slots=True)
class Named:
    """A job or a service, with whose name the names of its objects begin."""

    name: str
    settings: ManifestSettings

    def labels(self, component: str = "") -> Part:
        """Labels of its objects, or of one component's pods."""
        found = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": self.name}
        return {**found, "app.kubernetes.io/component": component} if component else found

    def metadata(self, name: str) -> Part:
        """Metadata of an object."""
        return {"name": name, "namespace": self.settings.namespace, "labels": self.labels()}

    def claims(self) -> list[Part]:
        """The PersistentVolumeClaims that the file of pods asks for."""
        found = []
        for name, volume in self.settings.pods.volumes.items():
            if (new := volume.create) is not None:
                size = {"resources": {"requests": {"storage": pods.bytes_text(new.size)}}}
                named = {"storageClassName": new.storage_class} if new.storage_class else {}
                kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
                spec = {"accessModes": [new.access], **named, **size}
                found.append({**kind, "metadata": self.metadata(f"{self.name}-{name}"), "spec": spec})
        return found
