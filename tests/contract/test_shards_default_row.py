"""With a learnt default row, shards mark the keys that read it, equally on any number of shards; rows do not change."""

import hashlib
import json

import numpy as np
import pytest

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import ABSENT_BITS, Gradients, StepScale, absent
from headrace.pserver.protocol.table_operations import ForgetRow
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.server.commands import DigestRows, Operate
from tests.contract import shards_world as w
from tests.contract.test_shards import SOME, SOME_IDS, some_batches
from tests.contract.test_shards_living import live, tables_of

ZEROS = TableSection(dim=4, optimizer=Adagrad(per="element"), admission=(CountEntry(kind="count", n=3, exact=True),))
LEARNT = ZEROS.model_copy(update={"default_row": "learnt"})
OF_ZEROS = "fe27f871bbf801a6a79efb98b2ce40e41ddeb0961264c74d397a7c21e03286ee"
"""SHA-256 of all that living tables read and end with, taken before default rows were learnt."""


def tables(default_row, **more):
    section = (LEARNT if default_row == "learnt" else ZEROS).model_copy(update=more)
    return {"default": section, "other": TableSection(dim=3, first_order=False)}


def history(kind, default_row, num_ranks=1, **more):
    """What every rank read in three passes of training, what inference sees after each, and digests."""
    with w.job(kind, num_ranks=num_ranks, tables=tables(default_row, **more)) as world:
        read, seen, digests = [], [], []
        for number in range(1, 4):

            def train(rank, shards, number=number):
                return w.train(shards, number, some_batches(rank, 3, seed=number), seed=number + rank, steps=3)[0]

            read += [batch["default"] for rows in world.each(train) for batch in rows]
            seen.append(world.one.look({"default": w.keys(*range(80))}, w.soon())["default"])
            digests.append(world.one.call(DigestRows(), w.soon()))
        return read, seen, digests


@pytest.mark.parametrize("kind", SOME, ids=SOME_IDS)
@pytest.mark.parametrize("more", [{}, {"memory": 8 << 20}, {"extend_at": 1.0}], ids=["", "bounded", "extended"])
def test_marks_stand_where_zeros_would_and_nothing_else_differs(kind, more):
    zeros, learnt = history(kind, "zeros", **more), history(kind, "learnt", **more)
    assert learnt[2] == zeros[2]
    for marked_UD, plain_UD in zip([*learnt[0], *learnt[1]], [*zeros[0], *zeros[1]], strict=True):
        absent_U = absent(marked_UD)
        assert (marked_UD.view(np.uint32)[absent_U] == ABSENT_BITS).all() and not plain_UD[absent_U].any()
        assert (marked_UD[~absent_U] == plain_UD[~absent_U]).all()
    shares = [absent(rows_UD).mean() for rows_UD in learnt[1]]
    assert 1 > shares[0] > shares[-1] > 0.2  # of 80 signs 20 never came


def test_three_ranks_read_the_same_marks_on_any_number_of_shards():
    (one, *_), (three, *_) = (history(kind, "learnt", num_ranks=3) for kind in (1, 3))
    assert all((a.view(np.uint32) == b.view(np.uint32)).all() for a, b in zip(one, three, strict=True))


@pytest.mark.parametrize("kind", SOME, ids=SOME_IDS)
def test_a_key_reads_the_default_row_until_the_push_that_crosses_then_its_initial_value(kind):
    with w.job(kind, tables=tables("learnt")) as world:
        shards, one = world.one, np.ones(1, np.float32)
        keys = {"default": w.keys(5)}
        shards.open_pass(1, w.soon())
        batches = [shards.prepare(keys, learn=True) for _ in range(5)]
        rows = [shards.pull(batches[0], w.soon())["default"]]
        for step in range(4):
            push = {"default": Gradients(np.full((1, 5), 0.5, np.float32), one, one)}
            rows.append(
                shards.exchange(step, batches[step], push, batches[step + 1], StepScale(1), w.soon())["default"]
            )
        assert [bool(absent(each)[0]) for each in rows] == [True, True, True, False, False]
        fresh = TableSection(dim=4)  # without admission: what the key would have begun with
        with w.job(0, tables={"default": fresh}) as other:
            other.one.open_pass(1, w.soon())
            initial = other.one.pull(other.one.prepare(keys, learn=True), w.soon())["default"]
        assert (rows[3] == initial).all() and (rows[4] != initial).all()  # no gradient of before the row was applied
        shards.close_pass(0, w.soon())
        shards.call(Operate(1, [ForgetRow(table="default", group=1, key=int(keys["default"].keys_U[0]))]), w.soon())
        assert absent(shards.look(keys, w.soon())["default"]).all()


def test_tables_with_zeros_read_and_end_with_the_bits_they_had_before():
    with w.job(0, tables=tables_of(None)) as world:
        said = live(world, 6, changes={})
    assert hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest() == OF_ZEROS
