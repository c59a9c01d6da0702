"""The contract of shards for a trainer: equal bits, embedded or with 1, 2 or 3 shards as servers."""

import numpy as np
import pytest

from headrace.pserver.config import TableSection, Wire
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.shards import Gradients, StepScale
from headrace.pserver.protocol.table_operations import FreezeSlot
from headrace.pserver.protocol.wire import TableWire, rounded
from headrace.pserver.row_optimizers import Adagrad, Sgd
from headrace.pserver.rows.digest import add
from headrace.pserver.server.commands import CountRows, DigestRows, Explain, Operate, RankRows
from headrace.pserver.server.shard_server import ShardServer
from tests.contract import shards_world as w

KINDS = [0, 1, 2, 3, w.OverTls(2)]
IDS = ["embedded", "1-shard", "2-shards", "3-shards", "2-shards-over-tls"]
"""Numbers of shards; 0 is embedded."""
SOME, SOME_IDS = [0, 3, w.OverTls(2)], ["embedded", "3-shards", "2-shards-over-tls"]
"""For what is the same on any number of servers, or told to each of them alone: all ways of reaching them."""
NARROW = [w.Narrow(number) for number in range(4)]
"""The same with rows and gradients that travel as bfloat16."""
both_wires = pytest.mark.parametrize("kinds", [KINDS, NARROW], ids=["float32", "bfloat16"])


@pytest.fixture(params=[*KINDS, NARROW[0], NARROW[2]], ids=[*IDS, "embedded-bfloat16", "2-shards-bfloat16"])
def world(request):
    with w.job(request.param) as made:
        yield made


def batch(*signs):
    return {"default": w.keys(*signs), "other": w.keys(*signs, group=2)}


def some_batches(rank=0, count=4, seed=0):
    draw = np.random.default_rng(100 * seed + rank)
    return [batch(*draw.choice(60, 25, replace=False).tolist()) for _ in range(count)]


def pulled(shards, signs, *, learn):
    return shards.pull(shards.prepare(batch(*signs), learn=learn), w.soon())


def test_an_unseen_key_reads_its_initial_value_for_learning_and_zeros_for_inference(world):
    world.one.open_pass(1, w.soon())
    learn, infer = (pulled(world.one, range(20), learn=learn) for learn in (True, False))
    assert (learn["default"][:, 0] == 0).all()  # first-order weight
    assert (np.abs(learn["default"][:, 1:]) <= 0.5).all() and len(np.unique(learn["default"][:, 1:])) > 70
    assert learn["default"].shape == (20, 5) and learn["other"].shape == (20, 3)
    assert not infer["default"].any() and not infer["other"].any()


@both_wires
def test_initial_values_do_not_depend_on_where_a_key_lives(kinds):
    values = []
    for kind in kinds:
        with w.job(kind) as world:
            world.one.open_pass(1, w.soon())
            values.append(pulled(world.one, range(30), learn=True))
    for other in values[1:]:
        assert all((other[name] == values[0][name]).all() for name in w.TABLES)


def test_a_pull_makes_no_row(world):
    world.one.open_pass(1, w.soon())
    pulled(world.one, range(20), learn=True)
    world.one.close_pass(0, w.soon())
    assert world.one.call(DigestRows(), w.soon()) == {"default": 0, "other": 0}
    assert [stats.num_rows for stats in world.one.call(CountRows(), w.soon()).tables.values()] == [0, 0]


def test_a_push_makes_rows_and_the_next_pull_sees_them(world):
    rows, _ = w.train(world.one, 1, [batch(1, 2, 3), batch(3, 1, 9)], seed=1, steps=2)
    before, after = rows[0]["default"], rows[1]["default"]
    assert (before[0] != after[1]).any() and (before[2] != after[0]).any()
    stats = world.one.call(CountRows(), w.soon()).tables
    assert stats["default"].num_rows == stats["default"].new_rows == 4
    assert stats["default"].rows_by_group == {1: 4} and stats["other"].rows_by_group == {2: 4}
    world.one.open_pass(2, w.soon())
    assert pulled(world.one, [9, 5], learn=False)["default"].any(axis=1).tolist() == [True, False]
    assert world.one.call(CountRows(), w.soon()).tables["default"].new_rows == 0


@both_wires
def test_one_rank_ends_with_the_same_bits_on_any_number_of_shards(kinds):
    digests, closes = [], []
    for kind in kinds:
        with w.job(kind) as world:
            _, close = w.train(world.one, 1, some_batches(), seed=1, steps=4, day=0)
            w.train(world.one, 2, some_batches(seed=1), seed=2, steps=4, day=3)
            digests.append(world.one.call(DigestRows(), w.soon()))
            closes.append(add(int(digest, 16) for digest in close.values()))
            assert sorted(close) == [str(shard) for shard in range(max(kind, 1))]
    assert all(digest == digests[0] for digest in digests) and all(digests[0].values())
    assert len(set(closes)) == 1


@both_wires
def test_three_ranks_end_with_the_same_bits_on_any_number_of_shards(kinds):
    digests = []
    for kind in kinds[1:4]:
        with w.job(kind, num_ranks=3) as world:
            batches = [some_batches(0, 4), some_batches(1, 2), []]  # one rank runs out, one never had any
            world.each(lambda rank, shards, b=batches: w.train(shards, 1, b[rank], seed=rank, steps=4))
            digests.append(world.one.call(DigestRows(), w.soon()))
    assert digests[0] == digests[1] == digests[2] and all(digests[0].values())


def test_pushes_of_ranks_are_added_in_rank_order():
    """1e8 + 1 - 1e8 in float32 is 0 or 1, by order; sgd with lr 1 shows the sum."""
    tables = {"default": TableSection(dim=0, optimizer=Sgd(kind="sgd", lr=1.0), bounds={"low": -1e9, "high": 1e9})}
    parts = [1e8, -1e8, 1.0]
    with w.job(2, num_ranks=3, tables=tables) as world:
        prepared = world.each(lambda rank, shards: shards.prepare({"default": w.keys(5)}, learn=True))
        world.each(lambda rank, shards: shards.open_pass(1, w.soon()))

        def exchange(rank, shards):
            one = np.ones(1, np.float32)
            push = Gradients(np.full((1, 1), parts[rank], np.float32), one, one)
            follow = shards.prepare({"default": w.keys(5)}, learn=True)
            return shards.exchange(0, prepared[rank], {"default": push}, follow, StepScale(3), w.soon())

        answers = world.each(exchange)
    assert [float(answer["default"][0, 0]) for answer in answers] == [-1.0] * 3


def test_all_ranks_read_the_same_rows_after_a_step():
    with w.job(2, num_ranks=2) as world:
        same = [batch(*range(10)), batch(*range(5, 20))]
        results = world.each(lambda rank, shards: w.train(shards, 1, same, seed=rank, steps=2))
    (rows_0, _), (rows_1, _) = results
    assert all((rows_0[1][name] == rows_1[1][name]).all() for name in w.TABLES)


def test_a_repeated_push_counts_once_and_is_answered_alike(world):
    shards = world.one
    shards.open_pass(1, w.soon())
    first, second = (shards.prepare(batch(*signs), learn=True) for signs in ([1, 2, 3], [2, 3, 4]))
    push = {name: w.push_of(w.keys(1, 2, 3), dim, 5) for name, dim in (("default", 5), ("other", 3))}
    answer = shards.exchange(0, first, push, second, StepScale(8), w.soon())
    digest = shards.call(DigestRows(), w.soon())
    again = shards.exchange(0, first, push, second, StepScale(8), w.soon())
    assert all((again[name] == answer[name]).all() for name in w.TABLES)
    assert shards.call(DigestRows(), w.soon()) == digest


def test_opening_and_closing_may_be_repeated(world):
    shards = world.one
    w.train(shards, 1, [batch(1)], seed=1, steps=1)
    digest = shards.call(DigestRows(), w.soon())
    assert shards.close_pass(0, w.soon()) == shards.close_pass(0, w.soon())
    assert shards.call(DigestRows(), w.soon()) == digest
    shards.open_pass(2, w.soon())
    shards.open_pass(2, w.soon())


@pytest.mark.parametrize("step", [1, 7])
def test_a_push_out_of_turn_is_refused(world, step):
    world.one.open_pass(1, w.soon())
    with pytest.raises(InvalidShardCall, match=f"step {step} of pass 1: the next step of this shard is 0"):
        world.one.exchange(step, None, None, None, StepScale(1), w.soon())


def test_a_pass_opens_once_and_in_order(world):
    w.train(world.one, 4, [batch(1)], seed=1, steps=1)
    with pytest.raises(InvalidShardCall, match="pass 3 cannot open: pass 4 was closed"):
        world.one.open_pass(3, w.soon())
    world.one.open_pass(6, w.soon())
    with pytest.raises(InvalidShardCall, match="pass 7 cannot open: pass 6 is not closed"):
        world.one.open_pass(7, w.soon())


def test_gradients_of_the_wrong_shape_are_refused_and_change_nothing(world):
    world.one.open_pass(1, w.soon())
    prepared = world.one.prepare({"default": w.keys(*range(9))}, learn=True)
    with pytest.raises(InvalidShardCall, match="shape|payload"):
        world.one.exchange(0, prepared, {"default": w.push_of(w.keys(*range(9)), 4, 1)}, None, StepScale(1), w.soon())
    assert world.one.call(DigestRows(), w.soon())["default"] == 0


def test_a_batch_that_is_only_predicted_cannot_be_learnt(world):
    world.one.open_pass(1, w.soon())
    prepared = world.one.prepare({"default": w.keys(*range(9))}, learn=False)
    with pytest.raises(InvalidShardCall, match="did not prepare to learn"):
        world.one.exchange(0, prepared, {"default": w.push_of(w.keys(*range(9)), 5, 1)}, None, StepScale(1), w.soon())


def test_a_table_nobody_knows_is_refused(world):
    world.one.open_pass(1, w.soon())
    with pytest.raises((InvalidShardCall, KeyError), match="nothing"):
        world.one.pull(world.one.prepare({"nothing": w.keys(1)}, learn=True), w.soon())


def test_a_skipped_step_changes_nothing_and_training_goes_on(world):
    shards = world.one
    shards.open_pass(1, w.soon())
    start = pulled(shards, [2, 3, 4], learn=True)
    first, second = (shards.prepare(batch(*signs), learn=True) for signs in ([1, 2, 3], [2, 3, 4]))
    rows = shards.exchange(0, first, None, second, StepScale(8), w.soon())
    assert all((rows[name] == start[name]).all() for name in w.TABLES)
    assert shards.call(DigestRows(), w.soon()) == {"default": 0, "other": 0}
    push = {name: w.push_of(w.keys(2, 3, 4), dim, 5) for name, dim in (("default", 5), ("other", 3))}
    assert shards.exchange(1, second, push, None, StepScale(8), w.soon()) is None
    assert shards.call(CountRows(), w.soon()).tables["default"].num_rows == 3


def test_rows_touched_get_the_day_of_their_pass(world):
    digests = []
    for day in (5, 6):
        with w.job(2, wire=world.wire) as other:
            w.train(other.one, 1, [batch(1, 2)], seed=1, steps=1, day=day)
            digests.append(other.one.call(DigestRows(), w.soon())["default"])
    w.train(world.one, 1, [batch(1, 2)], seed=1, steps=1, day=6)
    assert world.one.call(DigestRows(), w.soon())["default"] == digests[1] != digests[0]


def test_rows_are_ranked_by_their_shows_and_counted_by_the_days_since_they_were_seen(world):
    for number, (signs, day) in enumerate(([(1, 2, 3), 5], [(2, 3), 6], [(3, 9), 9]), 1):
        w.train(world.one, number, [batch(*signs)], seed=number, steps=1, day=day)
    found = world.one.call(RankRows("default", 2), w.soon())
    known = [world.one.call(Explain("default", row.key, row.group), w.soon()) for row in found.rows]
    assert [row.key for row in found.rows] == w.keys(3, 2).keys_U.tolist()
    for row, each in zip(found.rows, known, strict=True):  # which has them as of the last push
        decayed = w.TABLES["default"].decay ** row.unseen_days
        assert (row.show, row.click) == pytest.approx((each["show"] * decayed, each["click"] * decayed), rel=1e-5)
        assert row.unseen_days == each["unseen_days"]
    assert found.unseen == [2, 0, 0, 2, 0, 0, 0, 0] and (found.scanned, found.total) == (4, 4)


def test_rows_made_by_another_rank_are_seen_by_a_prediction_prepared_before():
    with w.job(2, num_ranks=2) as world:
        early = world.ranks[0].prepare(batch(1, 2), learn=False)
        world.each(lambda rank, shards: w.train(shards, 1, [[], [batch(1)]][rank], seed=1, steps=1))
        rows = world.ranks[0].pull(early, w.soon())
    assert rows["default"].any(axis=1).tolist() == [True, False]


def test_batches_of_a_pass_given_up_do_no_harm(world):
    """A trainer reads ahead; what it prepared and never used is let go of."""
    for _ in range(3):
        world.one.prepare(batch(50, 51), learn=True)
    w.train(world.one, 1, some_batches(), seed=1, steps=4)
    with w.job(0, wire=world.wire) as plain:
        w.train(plain.one, 1, some_batches(), seed=1, steps=4)
        assert world.one.call(DigestRows(), w.soon()) == plain.one.call(DigestRows(), w.soon())


def test_rows_that_travel_in_half_the_bits_are_those_of_the_shard_rounded():
    rows = {}
    for kind in (2, w.Narrow(2)):
        with w.job(kind) as world:
            world.one.open_pass(1, w.soon())
            rows[repr(kind)] = pulled(world.one, range(40), learn=True)
    wide, narrow = rows["2"], rows["2-bfloat16"]
    half = TableWire(Wire.BFLOAT16)
    for name in w.TABLES:
        assert (narrow[name] == rounded(wide[name], half)).all() and (narrow[name] != wide[name]).any()


def test_gradients_are_rounded_and_their_counts_are_not():
    """sgd with lr 1 shows the gradient; 257 shows are no bfloat16."""
    tables = {"default": TableSection(dim=0, optimizer=Sgd(kind="sgd", lr=1.0))}
    for kind in (w.Narrow(0), w.Narrow(1)):
        with w.job(kind, tables=tables) as world:
            shards = world.one
            shards.open_pass(1, w.soon())
            batch, following = (shards.prepare({"default": w.keys(5)}, learn=True) for _ in range(2))
            push = Gradients(np.full((1, 1), -1.001, np.float32), np.full(1, 257, np.float32), np.zeros(1, np.float32))
            answer = shards.exchange(0, batch, {"default": push}, following, StepScale(1), w.soon())
            assert answer["default"].tolist() == [[1.0]]
            assert shards.call(Explain("default", int(w.keys(5).keys_U[0]), 1), w.soon())["show"] == 257


@pytest.mark.parametrize("make", [int, w.OverTls], ids=["in-memory-and-at-ports", "over-tls"])
def test_bfloat16_halves_the_bytes_of_rows_and_gradients(make):
    """Two tables of 5 and 3 floats: 20 keys have 640 bytes of rows, and as many of gradients beside counts."""
    total = {}
    for wire in Wire.FLOAT32, Wire.BFLOAT16:
        with w.job(make(2), wire=wire) as world:
            shards, signs = world.one, [*range(20)]
            shards.open_pass(1, w.soon())
            batches = [shards.prepare(batch(*signs), learn=True) for _ in range(2)]
            for each in batches:
                shards.pull(each, w.soon())
            push = {name: w.push_of(w.keys(*signs), dim, 5) for name, dim in (("default", 5), ("other", 3))}
            before = [dict(link) for _, link in sorted(shards.links().items())]
            shards.exchange(0, batches[0], push, batches[1], StepScale(8), w.soon())
            after = [dict(link) for _, link in sorted(shards.links().items())]
            total[wire] = [
                sum(now[f"{way}_bytes"] + now[f"shared_{way}_bytes"] for now in after)
                - sum(was[f"{way}_bytes"] + was[f"shared_{way}_bytes"] for was in before)
                for way in ("sent", "received")
            ]
    wide, narrow = total[Wire.FLOAT32], total[Wire.BFLOAT16]
    assert [was - now for was, now in zip(wide, narrow, strict=True)] == [320, 320]


def test_a_trainer_with_another_wire_than_its_shards_is_refused():
    with ShardServer(w.process(0, 1, 1, w.TABLES)) as server:
        w.client([server], 0, 1).close()
        with pytest.raises(InvalidShardCall, match="other tables or settings"):
            w.client([server], 0, 1, wire=Wire.BFLOAT16)


FOLLOWING = {"default": TableSection(dim=4, optimizer=Adagrad(lr=0.5, initial=1.0), grad_scale="sum", in_batch=True)}


@pytest.mark.parametrize(
    "kind", [0, 2, w.Narrow(0), w.Narrow(2)], ids=["embedded", "shards", "halves", "shards-halves"]
)
def test_rows_to_learn_from_say_how_long_first_order_steps_are_and_others_do_not(kind):
    keys = {"default": w.keys(1, 2, 3)}
    exact = not isinstance(kind, w.Narrow)
    with w.job(kind, tables=FOLLOWING) as world:
        world.one.open_pass(1, w.soon())
        before = world.one.prepare(keys, learn=True)
        rows = world.one.pull(before, w.soon())["default"]
        assert rows[:, 5:].tolist() == [[4.0, 4.0]] * 3, "1 / 0.5^2 twice: the accumulators are at 1"
        push = {"default": Gradients(np.full((3, 5), 0.5, np.float32), np.ones(3, np.float32), np.zeros(3, np.float32))}
        after = world.one.prepare(keys, learn=True)
        rows = world.one.exchange(0, before, push, after, StepScale(2), w.soon())["default"]
        assert rows[:, 6].tolist() == [4.0] * 3
        assert rows[:, 5].tolist() == pytest.approx([8.0] * 3, rel=1e-6 if exact else 4e-3), "a gradient of 1 was added"
        world.one.exchange(1, after, None, None, StepScale(0), w.soon())
        world.one.close_pass(0, w.soon())
        assert world.one.look(keys, w.soon())["default"].shape == (3, 5)
        world.one.call(Operate(1, [FreezeSlot(slot="a", table="default", group=1)]), w.soon())
        world.one.open_pass(2, w.soon())
        rows = world.one.pull(world.one.prepare(keys, learn=True), w.soon())["default"]
        assert rows[:, 5:].tolist() == [[np.inf, 0]] * 3, "rows of a frozen slot rest"
