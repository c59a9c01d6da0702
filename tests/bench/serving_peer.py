"""CPU of a replica for each request, beside a server as users write one: onnxruntime, a dictionary of rows, FastAPI.

Both have the rows and the network of tests.bench.serving, and answer the same samples: one sample a request, and
requests of 500 samples, as raw tensors for the replica and as JSON for the peer. They run in turn, each alone, on one
core, and are asked by 8 connections without a pause. CPU counts, not time: who asks, and other work on the machine,
take a share of the cores.

`python -m tests.bench.serving_peer [--rounds 5] [--requests 4000] [--rows 100000]` prints medians and spread as JSON.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.bench import serving

CONNECTIONS, CANDIDATES = 8, 500
HEAD = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"


def peer(folder: Path, core: int) -> None:
    """The peer's process."""
    import onnxruntime
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    os.sched_setaffinity(0, {core})
    base = np.load(folder / "1.npz")
    rows = dict(zip(range(len(base["keys"])), base["rows"], strict=True))
    default = np.zeros(serving.DIM + 1, np.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(serving.network(), options, providers=["CPUExecutionProvider"])
    api = FastAPI()

    class Question(BaseModel):
        signs: list[list[int]]
        numbers: list[list[float]]

    @api.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    async def predict(question):  # type: ignore[no-untyped-def]
        feeds = {
            f"s{slot}": np.array([rows.get(signs[slot], default) for signs in question.signs], np.float32)
            for slot in range(serving.SLOTS)
        }
        feeds["numbers"] = np.array(question.numbers, np.float32)
        return {"ctr": session.run(["ctr"], feeds)[0].tolist()}

    predict.__annotations__["question"] = Question
    api.post("/predict")(predict)
    server = uvicorn.Config(api, port=0, log_level="warning", access_log=False)
    socket = server.bind_socket()
    (folder / "address").write_text(f"127.0.0.1:{socket.getsockname()[1]}")
    uvicorn.Server(server).run(sockets=[socket])


def requests_of(name: str, num_samples: int, num_rows: int, count: int) -> list[bytes]:
    """The same samples as requests to the replica, or to the peer."""
    rng, found = np.random.default_rng(2), []
    for _ in range(count):
        signs = rng.integers(num_rows + num_rows // 10, size=(num_samples, serving.SLOTS))
        numbers = rng.normal(size=(num_samples, serving.NUMBERS)).round(4)
        if name == "peer":
            body = json.dumps({"signs": signs.tolist(), "numbers": numbers.tolist()}).encode()
            found.append(HEAD % (b"/predict", len(body), b"") + body)
            continue
        columns = [(f"s{slot}", "UINT64", signs[:, slot : slot + 1].astype(np.uint64)) for slot in range(serving.SLOTS)]
        columns.append(("numbers", "FP32", numbers.astype(np.float32)))
        told = [{"name": each, "datatype": kind, "shape": list(values.shape)} for each, kind, values in columns]
        raw, request = b"", {"inputs": told}
        for tensor, (_, _, values) in zip(told, columns, strict=True):
            if num_samples == 1:
                tensor["data"] = values.reshape(-1).tolist()
            else:
                tensor["parameters"] = {"binary_data_size": values.nbytes}
                raw += values.tobytes()
        more = b""
        if raw:
            request["parameters"] = {"binary_data_output": True}
            more = b"Inference-Header-Content-Length: %d\r\n" % len(json.dumps(request))
        body = json.dumps(request).encode() + raw
        found.append(HEAD % (b"/v2/models/bench/infer", len(body), more) + body)
    return found


async def ask(address: str, requests: list[bytes], num: int) -> None:
    """Ask as many requests, on each connection one after another."""
    host, port = address.split(":")

    async def one(at: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for number in range(at, num, CONNECTIONS):
            writer.write(requests[number % len(requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readexactly(int(head.lower().partition(b"\ncontent-length: ")[2].split(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(one(at) for at in range(CONNECTIONS)))


def cpu_us(name: str, folder: Path, plans: dict[int, list[bytes]], num: int) -> dict[int, float]:
    """CPU microseconds of a server for each request, by its samples. Who asks has the other cores."""
    cores = sorted(os.sched_getaffinity(0))
    module = "tests.bench.serving" if name == "replica" else "tests.bench.serving_peer"
    command = [sys.executable, "-m", module, "--serve", str(folder), str(cores[0])]
    (folder / "address").unlink(missing_ok=True)
    process = subprocess.Popen(command, cwd=serving.ROOT)
    try:
        address, found = serving.ready(folder, process), {}
        for num_samples, requests in plans.items():
            count = max(20, num // num_samples) if num_samples > 1 else num
            asyncio.run(ask(address, requests, min(count, 200)))
            used, begin = serving.cpu_s(process.pid), time.perf_counter()
            asyncio.run(ask(address, requests, count))
            found[num_samples] = (serving.cpu_s(process.pid) - used) / count * 1e6
            wall_us = (time.perf_counter() - begin) / count * 1e6
            told = f"{name}, {num_samples} samples: {found[num_samples]:.0f} us of CPU, {wall_us:.0f} us a request"
            print(told, file=sys.stderr, flush=True)
        return found
    finally:
        process.terminate()
        process.wait(30)


def figures(rounds: int, num: int, num_rows: int) -> dict[str, dict[str, object]]:
    """Medians of CPU and of the ratio to the peer, over rounds in which both run in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serving.record(folder, num_rows, 0)
        plans = {
            who: {size: requests_of(who, size, num_rows, 500 if size == 1 else 20) for size in (1, CANDIDATES)}
            for who in ("replica", "peer")
        }
        taken = [{who: cpu_us(who, folder, plans[who], num) for who in plans} for _ in range(rounds)]
    found: dict[str, dict[str, object]] = {}
    for size in (1, CANDIDATES):
        ratios = sorted(each["peer"][size] / each["replica"][size] for each in taken)
        medians = {who: statistics.median(each[who][size] for each in taken) for who in plans}
        found[f"{size} samples a request"] = {
            **{f"{who}_cpu_us": round(us, 1) for who, us in medians.items()},
            "replica_samples_per_core_s": round(size / medians["replica"] * 1e6),
            "ratio": round(statistics.median(ratios), 2),
            "spread": [round(ratios[0], 2), round(ratios[-1], 2)],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "CORE"))
    told = parser.parse_args()
    if told.serve:
        peer(Path(told.serve[0]), int(told.serve[1]))
    else:
        print(json.dumps(figures(told.rounds, told.requests, told.rows)))


if __name__ == "__main__":
    main()
