"""Figures of all ranks: waits without a common clock, bytes of collectives, and what rank 0 tells of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.process_usage import ProcessUsage, process_usage
from headrace.pserver.protocol.shards import ShardFigures
from headrace.traffic import LinkTraffic, links_of
from headrace.trainer.collectives.collective_traffic import CollectiveTraffic
from headrace.trainer.collectives.ranks import KINDS, CollectiveWaits
from headrace.trainer.job_status import Status
from headrace.trainer.status.rank_figures import NO_REASON, RECENT_PASSES, RankFigures, WaitTotals, straggler
from headrace.trainer.status.time_spent import LoopPart


def test_a_link_counts_both_ways_and_shared_memory_apart():
    link, other = LinkTraffic(), LinkTraffic()
    link.sent(100)
    link.sent(8, shared_bytes=4000)
    other.received(30, shared_bytes=50)
    other.wait_s = 0.25
    assert links_of({"shard-0": link.plus(other), "shard-1": LinkTraffic()}) == {
        "shard-0": {
            "sent_bytes": 108,
            "sent_messages": 2,
            "received_bytes": 30,
            "received_messages": 1,
            "shared_sent_bytes": 4000,
            "shared_received_bytes": 50,
            "wait_s": 0.25,
        }
    }


def test_a_process_tells_its_own_time_and_memory():
    before = process_usage()
    assert before.machine and before.pid and before.memory_bytes > 1 << 20
    sum(range(3_000_000))
    assert process_usage().cpu_s > before.cpu_s


@given(arrivals=st.lists(st.integers(0, 1000), min_size=2, max_size=5), took=st.integers(0, 50))
def test_the_last_rank_to_come_to_a_collective_is_the_one_waited_for(arrivals, took):
    world, last = len(arrivals), int(np.argmax(arrivals))
    ranks = [CollectiveWaits(world) for _ in arrivals]
    for rank, arrival in zip(ranks, arrivals, strict=True):
        rank.add("all_reduce", max(arrivals) - arrival + took)
        rank.add("broadcast", 77.0)
    brought_RK = np.stack([rank.bring() for rank in ranks])
    for rank in ranks:
        rank.heard(brought_RK)
        expected = np.zeros((world, world))
        expected[:, last] = np.max(arrivals) - np.array(arrivals)
        np.testing.assert_array_equal(rank.waited_s, expected)
    assert not np.any(ranks[0].bring())
    assert brought_RK.shape == (world, len(KINDS))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_in_a_collective_all_that_is_sent_is_received(world, collective):
    ranks = [CollectiveTraffic(rank, world) for rank in range(world)]
    for rank in ranks:
        getattr(rank, collective)(1200 * world)
    for r, rank in enumerate(ranks):
        for peer, link in rank.peers.items():
            theirs = ranks[int(peer.removeprefix("trainer-"))].peers[f"trainer-{r}"]
            assert (link.sent_bytes, link.sent_messages) == (theirs.received_bytes, theirs.received_messages)
    total = sum(link.sent_bytes for rank in ranks for link in rank.peers.values())
    trips = {"all_reduce": 2, "all_gather": world, "broadcast": 1}[collective]
    assert total == trips * (world - 1) * 1200 * world


def test_in_a_gather_each_rank_sends_its_own_bytes_to_rank_0():
    ranks = [CollectiveTraffic(rank, 3) for rank in range(3)]
    for rank in ranks:
        for sender, num_bytes in ((1, 100), (2, 30)):
            rank.gather(sender, num_bytes)
    assert [link.received_bytes for link in ranks[0].peers.values()] == [100, 30]
    assert [rank.peers["trainer-0"].sent_bytes for rank in ranks[1:]] == [100, 30]


def test_rank_0_tells_the_links_of_all_and_the_waits_of_the_last_pass_and_lately():
    clock = [0.0]
    figures = RankFigures(2, lambda: clock[0])
    waited_s = np.zeros((2, 2))
    for _ in range(RECENT_PASSES + 5):
        clock[0] += 2.0
        waited_s[0, 1] += 0.5
        at_shards = np.array([[0.0, waited_s[0, 1]], [0.0, 0.0]])
        shards = [ShardFigures({"trainer-0": {"sent_bytes": 3}}, (share * at_shards).tolist()) for share in (0.5, 1.0)]
        usage = [ProcessUsage("one", 7 + rank, clock[0] * (1 + rank), 1 << 20) for rank in range(2)]
        said = figures.closed(Status(), [{"shard-0": {"sent_bytes": 7}}, {}], [{}, {}], waited_s, shards, usage)
    assert said.links == {
        "trainer-0": {"shard-0": {"sent_bytes": 7}, "trainer-1": {"wait_s": waited_s[0, 1]}},
        "shard-0": {"trainer-0": {"sent_bytes": 3}},
        "shard-1": {"trainer-0": {"sent_bytes": 3}},
    }
    assert {worker: (each.pid, each.cores) for worker, each in said.usage.items()} == {
        "trainer-0": (7, 1.0),
        "trainer-1": (8, 2.0),
    }
    waits = said.waits
    assert waits.last == [[0.0, 1.0], [0.0, 0.0]], "in collectives and, at shards together, once"
    assert waits.recent == [[0.0, float(RECENT_PASSES)], [0.0, 0.0]]
    assert (waits.recent_passes, waits.recent_s) == (RECENT_PASSES, 2.0 * RECENT_PASSES)


def totals(at_s, waits, *spent_s):
    waited_s = np.zeros((len(spent_s), len(spent_s)))
    for (rank, last), seconds in waits.items():
        waited_s[rank, last] = seconds
    return WaitTotals(at_s, waited_s, spent_s)


def test_the_straggler_is_named_with_the_part_of_its_work_that_is_slow():
    first = totals(100.0, {(0, 1): 5.0}, {"pipe": 1.0}, {"pipe": 50.0})
    now = totals(120.0, {(0, 1): 11.4, (1, 0): 0.1}, {"pipe": 1.5, "forward": 9.0}, {"pipe": 56.0, "forward": 9.0})
    found = straggler(first, now, 8)
    assert found.text == "rank 1 is waited for 32% of the time (rank 0 waits 0.8 s a pass): its pipe is slow"
    assert (found.rank, found.share, found.waits_s, found.part) == (1, 0.32, {"0": 0.8}, LoopPart.PIPE)


def test_a_straggler_without_a_slow_part_may_have_a_busy_machine():
    first = totals(0.0, {}, {}, {}, {})
    now = totals(10.0, {(0, 2): 4.0, (1, 2): 3.0}, {"forward": 3.0}, {"forward": 3.0}, {"forward": 4.0})
    found = straggler(first, now, 1)
    assert (found.rank, found.part, found.waits_s) == (2, None, {"0": 4.0, "1": 3.0})
    assert found.text.endswith(f"(rank 0 waits 4 s a pass, rank 1 waits 3 s a pass): {NO_REASON}")


def test_small_waits_name_nobody_and_a_single_rank_neither():
    assert straggler(totals(0.0, {}, {}, {}), totals(10.0, {(0, 1): 0.4, (1, 0): 0.3}, {}, {}), 1) is None
    assert straggler(totals(0.0, {}, {}), totals(10.0, {}, {"pipe": 9.0}), 1) is None
