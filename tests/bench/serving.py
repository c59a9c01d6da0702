"""How fast a replica answers while it is kept fresh: 1,000 single-sample requests a second on one core.

26 sparse slots of one sign, 13 numbers, a million rows of 17 floats, a network of 455 x 64 x 32 x 1. A recorded feed
gives a version a second, of 5,000 rows and all tensors. The server has one core for all it does; who asks is a process
of its own on the others, on a schedule that does not wait for answers: a late answer counts from when it was due.

`python -m tests.bench.serving [--rate 1000] [--seconds 30] [--rows 1000000]` prints the figures as JSON.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from headrace.dataset.spec.config import DenseSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.key_kernels import keys_of
from headrace.pserver.config import TableSection
from headrace.trainer.config import ExportSection, TaskSection
from headrace.trainer.exports.model_document import describe
from headrace.trainer.replica.updates import ReplicaRows, ReplicaUpdate, TableUpdate

ROOT = Path(__file__).resolve().parents[2]
SLOTS, NUMBERS, DIM, HIDDEN = 26, 13, 16, (64, 32)
CHANGED, EVERY_S, CONNECTIONS = 5_000, 1.0, 32
TARGET_P99_MS = 20.0


def schema() -> Schema:
    """One table for all slots."""
    sparse = [SparseSlot(name=f"s{number}", share="all") for number in range(SLOTS)]
    return Schema.of([*sparse, DenseSlot(kind="dense", name="numbers", size=NUMBERS)])


def model() -> dict:
    """model.json."""
    tasks = (TaskSection(name="ctr", label="click"),)
    return describe(schema(), {"default": TableSection(dim=DIM)}, tasks, ExportSection())


def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights of the network."""
    sizes = (SLOTS * (DIM + 1) + NUMBERS, *HIDDEN, 1)
    found = {}
    for layer, (rows, columns) in enumerate(zip(sizes, sizes[1:], strict=False)):
        found[f"w{layer}"] = (rng.normal(size=(rows, columns)) / rows**0.5).astype(np.float32)
        found[f"b{layer}"] = rng.normal(size=columns).astype(np.float32)
    return found


def network() -> bytes:
    """The same as ONNX."""
    f, weights = TensorProto.FLOAT, tensors(np.random.default_rng(0))
    inputs = [helper.make_tensor_value_info(f"s{number}", f, ["B", DIM + 1]) for number in range(SLOTS)]
    inputs.append(helper.make_tensor_value_info("numbers", f, ["B", NUMBERS]))
    nodes, last = [helper.make_node("Concat", [each.name for each in inputs], ["x"], axis=1)], "x"
    for layer in range(len(HIDDEN) + 1):
        nodes.append(helper.make_node("Gemm", [last, f"model.w{layer}", f"model.b{layer}"], [f"z{layer}"]))
        nodes.append(helper.make_node("Relu", [f"z{layer}"], [f"h{layer}"]))
        last = f"h{layer}"
    nodes[-1] = helper.make_node("Sigmoid", [f"z{len(HIDDEN)}"], ["p"])
    nodes.append(helper.make_node("Flatten", ["p"], ["p1"], axis=0))
    nodes.append(helper.make_node("Reshape", ["p1", "flat"], ["ctr"]))
    initial = [onnx.numpy_helper.from_array(value, f"model.{name}") for name, value in weights.items()]
    initial.append(helper.make_tensor("flat", TensorProto.INT64, [1], [-1]))
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("ctr", f, ["B"])], initial)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


def record(folder: Path, num_rows: int, versions: int) -> None:
    """A feed as files: a base, then what changed."""
    rng = np.random.default_rng(1)
    for version in range(1, versions + 2):
        signs = np.arange(num_rows) if version == 1 else rng.choice(num_rows, CHANGED, replace=False)
        keys = np.empty(len(signs), np.uint64)
        keys_of(signs.astype(np.uint64), 0, keys)
        rows = rng.normal(size=(len(signs), DIM + 1)).astype(np.float32)
        np.savez(folder / f"{version}.npz", keys=keys, rows=rows, **tensors(rng))


class Recorded:
    """A recorded feed: a version every EVERY_S. See trainer.replica.update_loop.ReplicaSource."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._version, self._next = folder, 0, Deadline.after(0)
        self._closed = threading.Event()

    def next(self, deadline: Deadline) -> ReplicaUpdate | None:
        path = self._folder / f"{self._version + 1}.npz"
        self._closed.wait(min(deadline.left_s(), self._next.left_s()) if path.exists() else deadline.left_s())
        if not self._next.passed() or not path.exists():
            return None
        self._version, self._next = self._version + 1, Deadline.after(EVERY_S)
        told = dict(np.load(path))
        keys = told.pop("keys")
        rows = ReplicaRows(keys, np.zeros(len(keys), np.uint16), told.pop("rows"))
        whole = self._version == 1
        return ReplicaUpdate(
            "bench", "t1", self._version, whole, {"default": TableUpdate([rows], np.empty(0, np.uint64))}, told,
            None, model() if whole else None, network() if whole else None,
        )  # fmt: skip

    def resume(self, served: object) -> None:
        self._version = 0

    def close(self) -> None:
        self._closed.set()


def serve(folder: Path, core: int) -> None:
    """The server's process: as trainer.replica.replica, with a recorded feed."""
    from headrace.trainer.replica import replica  # before it, this process asks for no core
    from headrace.trainer.replica.config import ReplicaConfig

    os.sched_setaffinity(0, {core})
    replica.source_of = lambda config, scratch: Recorded(folder)
    replica.run(ReplicaConfig(exports="recorded", listen="127.0.0.1:0", address_file=folder / "address"))


def bodies(num_rows: int, count: int = 500) -> list[bytes]:
    """Requests of one sample each."""
    rng = np.random.default_rng(2)
    found = []
    for _ in range(count):
        signs = rng.integers(num_rows + num_rows // 10, size=SLOTS).tolist()
        inputs = [{"name": f"s{at}", "datatype": "UINT64", "shape": [1, 1], "data": [s]} for at, s in enumerate(signs)]
        numbers = rng.normal(size=NUMBERS).round(4).tolist()
        inputs.append({"name": "numbers", "datatype": "FP32", "shape": [1, NUMBERS], "data": numbers})
        body = json.dumps({"inputs": inputs}).encode()
        head = b"POST /v2/models/bench/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        found.append(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return found


class Asker(asyncio.Protocol):
    """One connection: a request at a time, others wait their turn in `queue`."""

    def __init__(self, took: list[float], wrong: list[bytes]) -> None:
        self.took, self.wrong, self.queue, self.due = took, wrong, [], None
        self.got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, due_s: float, request: bytes) -> None:
        self.queue.append((due_s, request))
        if self.due is None:
            self._next()

    def _next(self) -> None:
        self.due = None
        if self.queue:
            self.due, request = self.queue.pop(0)
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.got += data
        head, found, body = self.got.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return
        self.took.append(time.perf_counter() - self.due)
        if not head.startswith(b"HTTP/1.1 200"):
            self.wrong.append(self.got)
        self.got = b""
        self._next()


def least_busy(askers: Sequence[Asker]) -> Asker:
    """One that is connected still: who was idle for long is sent away."""
    there = [each for each in askers if not each.transport.is_closing()]
    return min(there, key=lambda each: len(each.queue) + (each.due is not None))


async def load(address: str, rate: float, seconds: float, requests: list[bytes]) -> dict:
    """Ask on a schedule."""
    host, port = address.split(":")
    took: list[float] = []
    wrong: list[bytes] = []
    loop = asyncio.get_running_loop()
    askers = [
        (await loop.create_connection(lambda: Asker(took, wrong), host, int(port)))[1] for _ in range(CONNECTIONS)
    ]
    gaps = np.random.default_rng(3).exponential(1 / rate, int(rate * seconds))
    begin, num = time.perf_counter() + 0.1, 0
    for due_s in (begin + np.cumsum(gaps)).tolist():
        if (left_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)
        least_busy(askers).ask(due_s, requests[num % len(requests)])
        num += 1
    end = Deadline.after(10)
    while len(took) < num and not end.passed():  # noqa: ASYNC110  # who measures does nothing else
        await asyncio.sleep(0.01)
    ms = np.array(took) * 1e3
    return {
        "requests_per_s": len(took) / (time.perf_counter() - begin), "unanswered": num - len(took), "wrong": len(wrong),
        **{f"p{name}_ms": float(np.percentile(ms, float(name))) for name in ("50", "90", "99", "99.9")},
    }  # fmt: skip


def ready(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """The server's address, once it answers."""
    import urllib.error
    import urllib.request

    for _ in until(180):
        assert process.poll() is None, "the server has ended"
        try:
            address = (folder / "address").read_text()
            with urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=5):
                return address
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.1)
    raise TimeoutError("the server did not become ready")


def until(seconds: float) -> Iterator[None]:
    deadline = Deadline.after(seconds)
    while not deadline.passed():
        yield


def figures(rate: float = 1000, seconds: float = 30, num_rows: int = 1_000_000) -> dict:
    """Latency of requests while versions come."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder, num_rows, int(3 * seconds) + 20)
        command = [sys.executable, "-m", "tests.bench.serving", "--serve", name, str(cores[0])]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            address = ready(folder, process)
            os.sched_setaffinity(0, set(cores[1:]) or set(cores))
            requests = bodies(num_rows)
            asyncio.run(load(address, rate / 4, 3, requests))
            used, version = cpu_s(process.pid), version_at(address)
            found = asyncio.run(load(address, rate, seconds, requests))
            found["cpu_share"] = (cpu_s(process.pid) - used) / seconds
            found["versions_applied"] = version_at(address) - version
            return found | {"target_p99_ms": TARGET_P99_MS}
        finally:
            os.sched_setaffinity(0, set(cores))
            process.terminate()
            process.wait(30)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def version_at(address: str) -> int:
    """What is served."""
    import urllib.request

    with urllib.request.urlopen(f"http://{address}/v2/models/bench", timeout=10) as answer:
        return int(json.load(answer)["parameters"]["version"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "CORE"))
    told = parser.parse_args()
    if told.serve:
        serve(Path(told.serve[0]), int(told.serve[1]))
    else:
        print(json.dumps(figures(told.rate, told.seconds, told.rows)))


if __name__ == "__main__":
    main()
