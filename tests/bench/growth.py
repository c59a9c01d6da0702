"""The cost of a step's messages as trainers and shards become many: real messages over real sockets, and no compute.

Every trainer announces keys to every shard and exchanges gradients for rows with it, so a step has W x S pairs. Each
end is an asyncio task; four processes hold them all. Messages are those of the data plane, encoded and decoded as the
product does; a shard answers an exchange once all trainers have pushed. `joined`: the announcement travels inside the
exchange of the step before. Machines that join the calls of m trainers, or of m shards, are fewer ends with m times
the keys.

`python -m tests.bench.growth [--steps 5]` prints JSON: each layout, then the cost of a message and of a megabyte that
fits all of them, and what these make of larger layouts.
"""

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio

from headrace.pserver.protocol import frames
from headrace.pserver.protocol.frames import DataCall, DataReply, DataRequest, TableNumbers
from headrace.pserver.protocol.shards import Gradients, Keys

KEYS, WIDTH, TABLE = 28_000, 17, "rows"
"""Unique keys of a batch of W1, and the weights of a row."""
TABLES = TableNumbers({TABLE: WIDTH})
PROCESSES = 2
"""Of each side."""
KEY_BYTES, PUSH_BYTES, ROW_BYTES = 8 + 2, 4 * (WIDTH + 2), 4 * WIDTH
"""Of one key in an announcement, in a push, in a reply."""


@dataclass(frozen=True)
class Layout:
    """A step of so many trainers and shards."""

    trainers: int
    shards: int
    keys: int = KEYS
    """Of a trainer's batch, over all shards."""
    joined: bool = False

    @property
    def messages(self) -> int:
        """Of one step, replies included."""
        return self.trainers * self.shards * (2 if self.joined else 4)

    @property
    def megabytes(self) -> float:
        """Of one step, without headers."""
        return self.trainers * self.keys * (KEY_BYTES + PUSH_BYTES + ROW_BYTES) / 1e6


LAYOUTS = (
    Layout(4, 4),
    Layout(16, 16),
    Layout(32, 32),
    Layout(64, 64),
    Layout(64, 64, joined=True),
    Layout(8, 64, 8 * KEYS),
    Layout(8, 8, 8 * KEYS),
    Layout(8, 8, 8 * KEYS, joined=True),
)
"""The last three: 64 trainers, and then 64 shards as well, on machines of eight that join their calls."""
LARGER = (Layout(16, 16), Layout(64, 64), Layout(256, 256), Layout(256, 256, joined=True), Layout(32, 32, 8 * KEYS))


def context_of(max_sockets: int) -> zmq.asyncio.Context:
    """A context with room for all sockets of one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, max_sockets)
    return context


# --- a shard


async def serve(context: zmq.asyncio.Context, path: Path, layout: Layout, steps: int) -> None:
    """One shard: answers announcements at once, exchanges when those of all trainers are there."""
    router = context.socket(zmq.ROUTER)
    router.sndhwm = router.rcvhwm = 0
    router.bind(f"ipc://{path}")
    rows = np.zeros((layout.keys // layout.shards, WIDTH), np.float32)
    held = []
    for _ in range(steps * layout.trainers * (1 if layout.joined else 2)):
        peer, *message = [frame.buffer for frame in await router.recv_multipart(copy=False)]
        request = frames.decode_request(message[0], TABLES)
        if request.call is DataCall.ANNOUNCE:
            frames.keys_from(request, message[1:])
            await router.send_multipart([peer, frames.encode_reply(DataReply(request.request), TABLES)])
            continue
        frames.gradients_from(request, message[1:4], TABLES.widths)
        if layout.joined:
            frames.keys_from(request, message[4:])
        held.append((peer, request))
        if len(held) == layout.trainers:
            for peer, request in held:
                reply = frames.encode_reply(DataReply(request.request, parts=((TABLE, len(rows)),)), TABLES)
                await router.send_multipart([peer, reply, *frames.row_frames({TABLE: rows})], copy=False)
            held = []
    router.close(5000)


# --- a trainer


class Caller:
    """One trainer."""

    def __init__(self, context: zmq.asyncio.Context, folder: Path, layout: Layout, rank: int) -> None:
        self._layout, self._rank, self._request = layout, rank, 0
        count = layout.keys // layout.shards
        self._parts = ((TABLE, count),)
        self._keys = {TABLE: Keys(np.zeros(count, np.uint64), np.zeros(count, np.uint16))}
        ones = np.ones(count, np.float32)
        self._push = {TABLE: Gradients(np.zeros((count, WIDTH), np.float32), ones, ones)}
        self._sockets = []
        for shard in range(layout.shards):
            socket = context.socket(zmq.DEALER)
            socket.sndhwm = socket.rcvhwm = 0
            socket.connect(f"ipc://{folder}/{shard}")
            self._sockets.append(socket)

    async def step(self, number: int) -> None:
        """Announce and exchange with every shard."""
        if not self._layout.joined:
            await asyncio.gather(*(self._call(socket, DataCall.ANNOUNCE, number) for socket in self._sockets))
        await asyncio.gather(*(self._call(socket, DataCall.EXCHANGE, number) for socket in self._sockets))

    async def _call(self, socket: zmq.asyncio.Socket, call: DataCall, step: int) -> None:
        self._request += 1
        request = DataRequest(call, 1, self._rank, self._request, 60.0, 1, step, batch=step, parts=self._parts)
        arrays = frames.gradient_frames(self._push) if call is DataCall.EXCHANGE else frames.key_frames(self._keys)
        if self._layout.joined:
            arrays += frames.key_frames(self._keys)
        await socket.send_multipart([frames.encode_request(request, TABLES), *arrays], copy=False)
        message = [frame.buffer for frame in await socket.recv_multipart(copy=False)]
        frames.rows_from(frames.decode_reply(message[0], TABLES), message[1:], TABLES.widths)

    def close(self) -> None:
        """End."""
        for socket in self._sockets:
            socket.close(0)


# --- processes


def shards_process(folder: str, layout: Layout, mine: Sequence[int], steps: int) -> float:
    """CPU milliseconds a step of the shards `mine`."""

    async def run() -> None:
        context = context_of(2 * len(mine) + 16)
        await asyncio.gather(*(serve(context, Path(folder) / str(shard), layout, steps) for shard in mine))
        context.term()

    begin_s = time.process_time()
    asyncio.run(run())
    return 1000 * (time.process_time() - begin_s) / steps


def trainers_process(folder: str, layout: Layout, mine: Sequence[int], steps: int) -> tuple[float, float]:
    """Milliseconds a step, elapsed and of CPU, of the trainers `mine`; the first step, which connects, is left out."""

    async def run() -> tuple[float, float]:
        context = context_of(2 * len(mine) * layout.shards + 16)
        callers = [Caller(context, Path(folder), layout, rank) for rank in mine]
        begin = (0.0, 0.0)
        for step in range(steps):
            await asyncio.gather(*(caller.step(step) for caller in callers))
            if step == 0:
                begin = (time.perf_counter(), time.process_time())
        end = (time.perf_counter(), time.process_time())
        for caller in callers:
            caller.close()
        context.term()
        each = [1000 * (last - first) / (steps - 1) for first, last in zip(begin, end, strict=True)]
        return each[0], each[1]

    return asyncio.run(run())


def simulate(layout: Layout, steps: int) -> dict[str, float]:
    """A step of one layout."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2 * PROCESSES, get_context("spawn")) as pool:
        shards = [
            pool.submit(shards_process, folder, layout, range(part, layout.shards, PROCESSES), steps)
            for part in range(PROCESSES)
        ]
        trainers = [
            pool.submit(trainers_process, folder, layout, range(part, layout.trainers, PROCESSES), steps)
            for part in range(PROCESSES)
        ]
        found = [future.result() for future in trainers]
        return {
            "messages": layout.messages,
            "MB": layout.megabytes,
            "rows_a_message": layout.keys / layout.shards,
            "step_ms": max(elapsed for elapsed, _ in found),
            "cpu_ms": sum(cpu for _, cpu in found) + sum(future.result() for future in shards),
        }


def figures(steps: int) -> dict[str, dict]:
    """All layouts; a cost model fitted to their CPU time; what it says of larger ones."""
    measured = [simulate(layout, steps) for layout in LAYOUTS]
    causes = np.array([[each["messages"], each["MB"]] for each in measured])
    scale = 1 / np.array([each["cpu_ms"] for each in measured])  # relative errors
    (message_ms, megabyte_ms), *_ = np.linalg.lstsq(causes * scale[:, None], np.ones(len(measured)), rcond=None)
    found: dict[str, dict] = {name_of(layout): each for layout, each in zip(LAYOUTS, measured, strict=True)}
    found["cost"] = {
        "message_us": 1000 * message_ms,
        "MB_us": 1000 * megabyte_ms,
        "rows_a_message_where_both_cost_the_same": message_ms / (megabyte_ms * ROW_BYTES / 1e6),
    }
    for layout in LARGER:
        ends = layout.trainers + layout.shards
        found[f"on paper, {name_of(layout)}"] = asdict(layout) | {
            "messages": layout.messages,
            "MB": layout.megabytes,
            "cpu_ms_of_messages_at_each_end": message_ms * layout.messages / ends,
            "cpu_ms_of_bytes_at_each_end": megabyte_ms * layout.megabytes / ends,
        }
    return found


def name_of(layout: Layout) -> str:
    """A layout in words."""
    each = f"{layout.trainers} trainers x {layout.shards} shards, {layout.keys:,} keys each"
    return each + (", joined" if layout.joined else "")


def main() -> None:
    """Print the figures as JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=5)
    steps = arguments.parse_args().steps
    print(json.dumps(figures(steps) | {"cores": os.cpu_count()}, indent=2))


if __name__ == "__main__":
    main()
