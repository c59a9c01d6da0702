"""Pods of rendered manifests on test machines, a machine each: the commands of their containers, volumes, names."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.service.kubernetes.pods import ENDED_FOR_GOOD
from tests.machines.external_job import Output
from tests.machines.network import Machine

PLACE = "/srv"
"""All volumes but the scratch folders of the system lie below it; each machine gets an empty one."""


class PodMachine:
    """A machine that runs one pod, and once it has failed, another one of its template, as the Job of a pod does."""

    def __init__(
        self,
        machine: Machine,
        template: Mapping[str, Any],
        texts: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, Mapping[str, str]],
        hosts: Mapping[str, str],
        environment: Mapping[str, str],
        claims: Mapping[str, str] | None = None,
    ) -> None:
        """`texts`: data of ConfigMaps, `secrets`: of Secrets, by their names. `hosts`: addresses by name.

        `claims`: folders, outside of /tmp, of persistent volumes by the names of their claims.
        """
        self._claims = claims or {}
        self.machine, self._spec, self._environment = machine, template["spec"], environment
        self._texts, self._secrets, self._hosts = texts, secrets, hosts
        self._starts = 0
        self.outputs: list[Output] = []
        """Of the containers that stay, sidecars first; the last one's end is the pod's."""

    def start(self) -> list[Output]:
        """Fill the volumes, run the plain init containers to their ends, then start the others; sidecars come first."""
        names = "".join(f"{address} {name}\n" for name, address in self._hosts.items())
        (self.machine.tmp / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self.machine.call("sh", "-c", f"mount --bind /tmp/hosts /etc/hosts && mount -t tmpfs none {PLACE}")
        self._fill_volumes()
        outputs = self.outputs = []
        self._starts += 1
        inits = self._spec.get("initContainers", ())
        for each in (*inits, *self._spec["containers"]):
            output = self._start(each)
            if each in inits and each.get("restartPolicy") != "Always":
                assert output.end() == 0, output.said
            else:
                outputs.append(output)
        return outputs

    def make_again(self) -> None:
        """If the pod has failed, start another one with empty volumes."""
        if code := self.outputs[-1].process.poll():
            assert code not in ENDED_FOR_GOOD, self.outputs[-1].said
            self.die()
            self.start()

    def die(self) -> None:
        """End all of its containers at once, and lose its volumes."""
        self.machine.die()
        for output in self.outputs:
            output.kill()

    def _start(self, container: Mapping[str, Any]) -> Output:
        """Each container has a mount namespace of its own, as in a pod; a restart is not played."""
        known = {**self._environment}
        for variable in container.get("env", ()):
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
            known[variable["name"]] = f"uid-{self._starts}-of-{self.machine.name}"
        for each in container.get("envFrom", ()):
            known |= self._secrets[each["secretRef"]["name"]]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return Output(self.machine.start(("unshare", "--mount", *container["command"]), environment=known, **pipes))

    def _fill_volumes(self) -> None:
        """Make the folders of all volumes, with the files of ConfigMaps and Secrets."""
        volumes = {each["name"]: each for each in self._spec["volumes"]}
        for container in (*self._spec.get("initContainers", ()), *self._spec["containers"]):
            for mount in container["volumeMounts"]:
                path, volume = mount["mountPath"], volumes[mount["name"]]
                if path.startswith(f"{PLACE}/"):
                    if (file := mount.get("subPath")) is not None:
                        self._write(path, self._files(volume)[file])
                        continue
                    self.machine.call("mkdir", "-p", path)
                    self._claim(volume, path)
                    for name, text in self._files(volume).items():
                        self._write(f"{path}/{name}", text)

    def _claim(self, volume: Mapping[str, Any], path: str) -> None:
        """Mount a persistent volume, once."""
        if (claim := volume.get("persistentVolumeClaim")) is not None:
            script = 'mountpoint -q "$2" || mount --bind "$1" "$2"'
            self.machine.call("sh", "-c", script, "sh", self._claims[claim["claimName"]], path)

    def _files(self, volume: Mapping[str, Any]) -> dict[str, str]:
        kinds = (("configMap", "name", self._texts), ("secret", "secretName", self._secrets))
        for kind, key, known in kinds:
            if kind in volume:
                data = known[volume[kind][key]]
                items: Sequence[Mapping[str, str]] = volume[kind].get("items") or [
                    {"key": key, "path": key} for key in data
                ]
                return {item["path"]: data[item["key"]] for item in items}
        assert "emptyDir" in volume or "persistentVolumeClaim" in volume
        return {}

    def _write(self, path: str, text: str) -> None:
        kept = self.machine.tmp / "text"
        kept.write_text(text)
        self.machine.call(
            "sh", "-c", f"mkdir -p {shlex.quote(str(Path(path).parent))} && cp /tmp/text {shlex.quote(path)}"
        )


def templates(objects: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The template of each pod, as often as there are such pods: the head first, replicas last."""
    counts = {"Job": "parallelism", "Deployment": "replicas"}
    found = [(each["spec"], counts[each["kind"]]) for kind in counts for each in objects if each["kind"] == kind]
    return [spec["template"] for spec, count in found for _ in range(spec[count])]
