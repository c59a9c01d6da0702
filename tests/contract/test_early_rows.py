"""Rows that come early have the bits of those that come after the step, on any shards, and from any ranks."""

import numpy as np
import pytest

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import TableSection
from headrace.pserver.errors import StepTimedOut
from headrace.pserver.protocol.shards import StepScale
from tests.contract import shards_world as w

STEPS = 5
TABLES = {
    "default": w.TABLES["default"],
    "picky": TableSection(dim=2, admission=[CountEntry(kind="count", n=2)]),
}


def batches(rank):
    """Keys of each step; neighbours share some of them. Rank 1 runs out of batches after two steps."""
    draw = np.random.default_rng(rank)
    chosen = [sorted(draw.choice(40, 12, replace=False).tolist()) for _ in range(STEPS if rank != 1 else 2)]
    return [{name: w.keys(*signs) for name in TABLES} for signs in chosen]


def train(rank, shards, *, early):
    """All rows that a rank reads in a pass, and the digest of its close."""
    shards.open_pass(1, w.soon())
    keys = batches(rank)
    ready = [shards.prepare(each, learn=True) for each in keys]
    read = [shards.pull(ready[0], w.soon())]
    for step in range(STEPS):
        mine, following = (ready[at] if at < len(ready) else None for at in (step, step + 1))
        if early:
            shards.ask_early(step, mine, following, w.soon())
        push = None
        if mine is not None:
            widths = {name: rows.shape[1] for name, rows in read[step].items()}
            push = {name: w.push_of(keys[step][name], width, 10 * step + rank) for name, width in widths.items()}
        answer = shards.exchange(step, mine, push, following, StepScale(30), w.soon())
        assert (answer is None) == (following is None)
        read += [] if answer is None else [answer]
    digest = shards.close_pass(0, w.soon())
    return [{name: rows.tobytes() for name, rows in each.items()} for each in read], digest


@pytest.mark.parametrize("num_shards", [1, 2, w.OverTls(2), w.Narrow(2)])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_bit_depends_on_rows_that_come_early(num_shards, num_ranks):
    found = []
    for early in (False, True):
        with w.job(num_shards, num_ranks, TABLES) as world:
            found.append(world.each(lambda rank, shards: train(rank, shards, early=early)))  # noqa: B023
    assert found[0] == found[1]


def test_an_embedded_shard_has_nothing_to_send_early():
    found = []
    for early in (False, True):
        with w.job(0, 1, TABLES) as world:
            found.append(train(0, world.one, early=early))
    assert found[0] == found[1]


def test_a_row_is_sent_once():
    """Early rows cost their marks and a message; they do not come a second time."""
    received = []
    for early in (False, True):
        with w.job(2, 1, TABLES) as world:
            train(0, world.one, early=early)
            received.append(
                sum(link["received_bytes"] + link["shared_received_bytes"] for link in world.one.links().values())
            )
    assert received[0] < received[1] < received[0] + STEPS * 2 * 200


def test_a_rank_that_asks_alone_waits_for_the_others_and_names_them():
    with w.job(1, 2, TABLES) as world:
        shards = world.one
        shards.open_pass(1, w.soon())
        first, second = (shards.prepare(each, learn=True) for each in batches(0)[:2])
        shards.pull(first, w.soon())
        soon = w.Deadline.after(1.0)
        shards.ask_early(0, first, second, soon)
        with pytest.raises(StepTimedOut, match="waited .* in step 0 of pass 1 for rank 1: is that trainer alive"):
            shards.exchange(0, first, None, second, StepScale(30), w.soon())
