"""Traffic between trainers and shards: both ends count the same, and waits are those for the last rank."""

import pytest

from headrace.pserver.protocol.shards import StepScale
from headrace.pserver.server.commands import CountRows
from tests.contract import shards_world as w


def trained(world, num_ranks, steps=3):
    batches = [{"default": w.keys(*range(step, step + 500))} for step in range(steps)]
    world.each(lambda rank, shards: w.train(shards, 1, batches, seed=rank, steps=steps))
    counts = world.one.call(CountRows(), w.soon())
    return [shards.links() for shards in world.ranks], [figures.links for figures in counts.figures]


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_both_ends_count_the_same(num_shards, num_ranks):
    with w.job(num_shards, num_ranks) as world:
        trainers, shards = trained(world, num_ranks)
    for r, links in enumerate(trainers):
        assert sorted(links) == [f"shard-{s}" for s in range(num_shards)]
        for s in range(num_shards):
            mine, theirs = links[f"shard-{s}"], shards[s][f"trainer-{r}"]
            for way, back in (("sent", "received"), ("received", "sent")):
                for what in ("{}_bytes", "{}_messages", "shared_{}_bytes"):
                    assert mine[what.format(way)] == theirs[what.format(back)]
            on_this_machine = mine["shared_sent_bytes"] > 0
            assert on_this_machine == (s % 2 == 0), "every second shard listens at a port"
            rows = mine["shared_received_bytes" if on_this_machine else "received_bytes"]
            assert rows > 4 * 1000, "at least the rows of 500 keys over all shards, three times"


def test_embedded_nothing_is_counted():
    with w.job(0) as world:
        trainers, shards = trained(world, 1)
    assert (trainers, shards) == ([{}], [])


def test_a_shard_knows_who_was_last():
    with w.job(2, 2) as world:

        def act(rank, shards):
            shards.open_pass(1, w.soon())
            figures = lambda: shards.call(CountRows(), w.soon()).figures  # noqa: E731
            while rank == 1 and not all("trainer-0" in each.links for each in figures()):
                pass  # until the push of rank 0 is held
            shards.exchange(0, None, None, None, StepScale(1), w.soon())
            shards.close_pass(0, w.soon())

        world.each(act)
        for figures in world.one.call(CountRows(), w.soon()).figures:
            (_, waited_s), (nothing, _) = figures.waited_s
            assert nothing == 0 < waited_s
            assert figures.links["trainer-1"]["wait_s"] == waited_s
            assert figures.links["trainer-0"]["wait_s"] == 0
