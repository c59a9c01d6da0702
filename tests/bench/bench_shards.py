"""What shards cost: kernels on one core, the exchange of a W1 step's rows, memory per million rows.

`python tests/bench/bench_shards.py [kernels | exchange_28k | wire | memory_per_million_rows]` prints JSON. Figures are
of the machine and the minute: quote them together.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from headrace.deadline import Deadline
from headrace.key_kernels import keys_of
from headrace.pserver import row_optimizer_kernels
from headrace.pserver.client.connection import ShardCaller
from headrace.pserver.client.remote import RemoteShards
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.protocol.shards import Gradients, Keys, Shards, StepScale
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.rows import kernels as row_kernels
from headrace.pserver.rows.table_rows import frozen
from headrace.pserver.server.embedded import EmbeddedShards
from tests.fakes.rendezvous import RendezvousHere

ROOT = Path(__file__).resolve().parents[2]
UNIQUE, KNOWN = 28_000, 900_000
"""Unique keys of a W1 batch; rows of the table they fall on."""
TABLES = {"default": TableSection(dim=16, optimizer=Adagrad(per="element"))}


def _median_s(act: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def _keys(signs: np.ndarray) -> Keys:
    keys_U = np.empty(len(signs), np.uint64)
    keys_of(signs.astype(np.uint64), 0, keys_U)
    return Keys(keys_U, np.zeros(len(signs), np.uint16))


def kernels() -> dict[str, float]:
    """Millions a second on one core: keys found, 64-byte rows gathered, rows learnt."""
    draw = np.random.default_rng(1)
    figures = {}
    for name, num_rows in (("small", 10_000), ("large", 4_000_000)):
        keys_R = _keys(np.arange(num_rows)).keys_U
        index_I = np.full(1 << int(np.ceil(np.log2(num_rows / 0.65))), -1, np.int32)
        row_kernels.rebuild_index(index_I, keys_R, num_rows)
        wanted = [frozen(keys_R[draw.integers(0, num_rows, UNIQUE)]) for _ in range(30)]
        rows_U = np.empty(UNIQUE, np.int32)
        each = iter(wanted * 2)
        taken_s = _median_s(lambda: row_kernels.find(index_I, keys_R, next(each), rows_U))  # noqa: B023
        figures[f"find_{name}_M_keys_s"] = UNIQUE / taken_s / 1e6
    for name, kernel, width, dim in (
        ("gather", row_kernels.gather, 18, 16),
        ("adagrad_row", row_optimizer_kernels.adagrad_row, 18, 16),
        ("adagrad_element", row_optimizer_kernels.adagrad_element, 32, 16),
    ):
        slab_RW = np.full((KNOWN, width), 0.5, np.float32)
        batches = iter([frozen(draw.integers(0, KNOWN, UNIQUE).astype(np.int32)) for _ in range(60)])
        data = np.ones((UNIQUE, dim), np.float32)
        settings = np.full((2, 6), 0.01, np.float32)
        if name == "gather":
            taken_s = _median_s(lambda: kernel(slab_RW, next(batches), 0, UNIQUE, data))  # noqa: B023
        else:
            given = frozen(data)
            taken_s = _median_s(lambda: kernel(slab_RW, next(batches), given, 0, UNIQUE, 0, settings))  # noqa: B023
        figures[f"{name}_M_rows_s"] = UNIQUE / taken_s / 1e6
    return figures


def _start_shards(num_shards: int, folder: Path, stack: ExitStack, *, port: bool) -> tuple[list[str], list[int]]:
    """Addresses and process ids; with `port`, the data plane is a TCP port with CURVE."""
    names, pids = [f"shard-{shard}" for shard in range(num_shards)], []
    rendezvous = stack.enter_context(RendezvousHere(folder, *names))
    for shard in range(num_shards):
        config = ShardProcess(
            shard=shard,
            num_shards=num_shards,
            num_ranks=1,
            tables=TABLES,
            seed=1,
            socket=folder / f"{shard}.socket",
            launcher=rendezvous.contact(f"shard-{shard}"),
        )
        if port:
            (folder / f"{shard}.data").touch()  # where the folder of its socket would be
        path = folder / f"{shard}.json"
        path.write_text(config.model_dump_json())
        command = [sys.executable, "-m", "headrace.pserver", "--config", str(path)]
        child = stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT
            )
        )
        stack.callback(child.terminate)
        pids.append(child.pid)
    return [rendezvous.address(name) for name in names], pids


def _exchanges(shards: Shards, steps: int, pids: Sequence[int] = ()) -> dict[str, float]:
    """Milliseconds of prepare and exchange, and of CPU time of `pids`, in the second half of the steps."""
    deadline, draw = Deadline.after(300), np.random.default_rng(1)
    batches = [_keys(draw.choice(KNOWN, UNIQUE, replace=False)) for _ in range(40)]
    shards.open_pass(1, deadline)
    mine = shards.prepare({"default": batches[0]}, learn=True)
    shards.pull(mine, deadline)
    push = {"default": Gradients(np.full((UNIQUE, 17), 0.01, np.float32), *[np.ones(UNIQUE, np.float32)] * 2)}
    times = []
    for step in range(steps):
        if step == steps // 2:
            cpu_ms = _cpu_ms(pids)
        begin = time.perf_counter()
        following = shards.prepare({"default": batches[(step + 1) % 40]}, learn=True)
        prepared = time.perf_counter()
        time.sleep(0.005)  # a trainer computes here, and announced keys are looked up
        asked = time.perf_counter()
        shards.exchange(step, mine, push, following, StepScale(4096), deadline)
        times.append((prepared - begin, time.perf_counter() - asked))
        mine = following
    cpu_ms = (_cpu_ms(pids) - cpu_ms) / (steps - steps // 2)
    shards.close_pass(0, deadline)
    settled = 1000 * np.array(times[steps // 2 :])
    prepare, exchange = np.median(settled, axis=0)
    return {
        "prepare_ms": prepare,
        "exchange_ms": exchange,
        "exchange_ms_p10": float(np.quantile(settled[:, 1], 0.1)),
        "cpu_ms": cpu_ms,
    }


def exchange_28k(steps: int = 120) -> dict[str, dict[str, float]]:
    """Push and pull of 28,000 rows x 17 floats: embedded, and on 1 and 2 shards as processes."""
    figures = {}
    embedded = EmbeddedShards(ShardProcess.alone(TABLES, 1), os.cpu_count() or 1)
    figures["embedded"] = _exchanges(embedded, steps)
    embedded.close()
    for num_shards in (1, 2):
        figures[f"shards_{num_shards}"] = _remote_exchanges(num_shards, steps, port=False)
    return figures


def wire(rounds: int = 5, steps: int = 120) -> dict[str, dict[str, list[float]]]:
    """The same on 2 shards by unix sockets and by TCP with CURVE, in turn: medians of each round, and the CPU time of
    all three processes for a step."""
    figures: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, port in (("unix_sockets", False), ("tcp_with_curve", True)):
            found = _remote_exchanges(2, steps, port=port)
            of_way = figures.setdefault(name, {"exchange_ms": [], "cpu_ms": []})
            for key, values in of_way.items():
                values.append(round(found[key], 2))
    return figures


def _remote_exchanges(num_shards: int, steps: int, *, port: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        addresses, pids = _start_shards(num_shards, Path(folder), stack, port=port)
        with closing(
            RemoteShards(addresses, TABLES, ShardCaller(rank=0, world=1, generation=1, secret=""), Deadline.after(60))
        ) as shards:
            return _exchanges(shards, steps, [os.getpid(), *pids])


def _cpu_ms(pids: Sequence[int]) -> float:
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return 1000 * sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def memory_per_million_rows() -> dict[str, float]:
    """MB (10^6) of resident memory a million rows: slope from 1 M to 5 M; dim 16, adagrad by row."""
    code = "from tests.bench import bench_shards; bench_shards.grow()"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(said)
    return figures


def grow() -> None:
    """Fill a table with 5 million rows in this process; print its memory."""
    shards = EmbeddedShards(ShardProcess.alone({"default": TableSection(dim=16, optimizer=Adagrad(per="row"))}, 1))
    deadline, step_rows, resident = Deadline.after(600), 50_000, {}
    shards.open_pass(1, deadline)
    push = {"default": Gradients(np.ones((step_rows, 17), np.float32), *[np.ones(step_rows, np.float32)] * 2)}
    for step in range(100):
        keys = _keys(np.arange(step * step_rows, (step + 1) * step_rows))
        shards.exchange(step, shards.prepare({"default": keys}, learn=True), push, None, StepScale(4096), deadline)
        resident[(step + 1) * step_rows] = _resident_mb()
    slope = (resident[5_000_000] - resident[1_000_000]) / 4
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    at = {"rss_mb_at_1M": resident[1_000_000], "rss_mb_at_5M": resident[5_000_000], "peak_mb": peak_mb}
    print(json.dumps({"mb_per_million_rows": slope, **at}))


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    wanted = sys.argv[1:] or ["kernels", "exchange_28k", "memory_per_million_rows"]
    for each in wanted:
        print(each, json.dumps(globals()[each](), indent=2))
