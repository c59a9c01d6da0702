"""A replica as a process of its own: fed by a running job or following its exports, it answers as the job predicts."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from headrace.deadline import Deadline
from tests.integration.followed_job import FollowedJob

EXPORTS = 'exports={serving={delta="1ms", clock="wall"}}'
WITHIN_S = 60.0


class Replica:
    """`headrace replica` in a process of its own."""

    model, within_s = "small", WITHIN_S

    def __init__(self, folder: Path, *options: str) -> None:
        self.file = folder / f"address-{len(list(folder.glob('address-*')))}"
        self.log = (folder / f"{self.file.name}.log").open("w+b")
        command = [
            sys.executable,
            "-m",
            "service",
            "replica",
            "--listen",
            "127.0.0.1:0",
            "--address-file",
            str(self.file),
        ]
        self.process = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log
        )

    def get(self, path: str, told: object = None) -> dict:
        """Raises OSError, and HTTPError, which is one."""
        body = None if told is None else json.dumps(told).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.file.read_text()}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def version(self) -> int:
        """The version that is served; 0: none."""
        try:
            return int(self.get(f"/v2/models/{self.model}")["parameters"]["version"])
        except OSError:
            return 0

    def until(self, version: int) -> None:
        deadline = Deadline.after(self.within_s)
        while self.version() < version:
            assert self.process.poll() is None, self.said()
            assert not deadline.passed(), f"version {self.version()}, not {version}: {self.said()}"
            time.sleep(0.05)

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.log.close()


@pytest.fixture
def start(tmp_path):
    started: list[Replica] = []

    def begin(*options):
        started.append(Replica(tmp_path, *options))
        return started[-1]

    yield begin
    for replica in started:
        replica.process.kill()
        replica.process.wait()
        replica.log.close()


def tensors(export: Path) -> tuple[list[dict], np.ndarray]:
    """A request with an export's golden samples, and what must be answered."""
    golden, model = pq.read_table(export / "golden.parquet"), json.loads((export / "model.json").read_text())
    found = []
    for slot in model["slots"]:
        values = golden[slot["name"]].to_pylist()
        flat = [each for sample in values for each in sample]
        if slot["kind"] == "dense":
            shape = [len(values), slot["size"]]
            found.append({"name": slot["name"], "datatype": "FP32", "shape": shape, "data": flat})
            continue
        found.append({"name": slot["name"], "datatype": "UINT64", "shape": [len(flat)], "data": flat})
        lengths = [len(each) for each in values]
        name = f"{slot['name']}.lengths"
        found.append({"name": name, "datatype": "INT64", "shape": [len(values)], "data": lengths})
    return found, golden["prediction.ctr"].to_numpy()


@pytest.mark.long
def test_a_replica_of_either_kind_answers_as_the_job_predicts(tmp_path, start):
    followed = FollowedJob(tmp_path, 3)
    job = followed.start(EXPORTS)
    try:
        job.until_stored()
        fed = start("--store", str(job.store))
        for version in (1, 2, 3):  # one by one: several that wait at once come as one
            followed.arrive(version)
            fed.until(version)
        job.process.send_signal(signal.SIGTERM)
        code, output = job.end()
        assert code == 0, output
        folder = job.store / "exports" / "serving" / "small"
        current = json.loads((folder / "current.json").read_text())
        exported = start("--exports", str(folder))
        exported.until(current["version"])
    finally:
        job.kill()
    inputs, wanted = tensors(folder / current["path"])
    offset = load_file(folder / current["path"] / "dense.safetensors")["calibration.offset_T"]
    assert abs(offset[0]) > 1e-3, "a replica that leaves the calibration out is seen below"
    newest = fed.get("/v2/models/small")["parameters"]["version"]
    assert fed.get("/v2/models/small/rollback", {"version": current["version"]})["held_back"]
    for replica in (fed, exported):
        answer = replica.get("/v2/models/small/infer", {"inputs": inputs})
        assert answer["model_version"] == str(current["version"]), replica.said()
        assert np.abs(np.array(answer["outputs"][0]["data"]) - wanted).max() < 1e-5
    assert fed.get("/v2/models/small/follow", {})["version"] == newest
    assert fed.end() == 0 and exported.end() == 0
