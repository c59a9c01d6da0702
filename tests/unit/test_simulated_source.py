import json
import time

import numpy as np
import pytest

from headrace.config import validate
from headrace.dataset.sources import simulated
from headrace.dataset.sources.simulated import CHUNK_EVENTS, START_S, SimulatedSource, SimulatedStream
from headrace.dataset.sources.simulated_world import DAY_S, EVENTS_A_DAY, World, draws
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.errors import SpecError


def config(**settings) -> SimulatedSource:
    return SimulatedSource(kind="simulated", **({"events": 40_000} | settings))


def blocks(source, partition=0, begin=0, end=100):
    return list(source.read(Segment(f"simulated/{partition}", partition, begin, end), Deadline.after(5)))


def lines(source, partition=0, begin=0, end=100) -> list[bytes]:
    return [block.value(i) for block in blocks(source, partition, begin, end) for i in range(len(block))]


def scene(world: World, num_events: int, partition: int = 0):
    index_E = np.arange(num_events, dtype=np.int64) * world.partitions + partition
    count = num_events * (2 + 2 * world.shown)
    return world.scene(partition, index_E, draws(world.seed, partition, 0, count).reshape(num_events, -1))


def auc(labels, scores) -> float:
    order = np.argsort(scores, kind="stable")
    rank = np.empty(len(scores))
    rank[order] = np.arange(1, len(scores) + 1)
    positives = labels.sum()
    return (rank[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


def test_an_event_is_one_line_of_json_as_promised():
    for line in lines(SimulatedStream(config(shown=3), 1)):
        assert b"\n" not in line and b" " not in line
        event = json.loads(line)
        assert list(event) == ["ts", "user", "device", "hour", "shown", "topics", "clicked"]
        assert len(event["shown"]) == len(event["topics"]) == len(event["clicked"]) == 3
        assert set(event["clicked"]) <= {0, 1} and 0 <= event["device"] < 4 and 0 <= event["hour"] < 24


def test_the_first_event_never_changes():
    """The stream of a seed is part of every example's numbers; change it only with them."""
    golden = (
        b'{"ts":1704067200.000,"user":1672,"device":0,"hour":0,'
        b'"shown":[48,1,1620,5,1110],"topics":[14,18,5,13,6],"clicked":[1,0,1,0,0]}'
    )
    assert lines(SimulatedStream(config(), 1), end=1) == [golden]


def test_the_same_seed_gives_the_same_bytes_and_another_does_not():
    assert lines(SimulatedStream(config(), 7)) == lines(SimulatedStream(config(), 7))
    assert lines(SimulatedStream(config(), 7)) != lines(SimulatedStream(config(), 8))
    assert lines(SimulatedStream(config(), 7), 0) != lines(SimulatedStream(config(), 7), 1)


def test_chunks_that_were_dropped_are_made_again_alike(monkeypatch):
    monkeypatch.setattr(simulated, "MAX_CHUNKS_KEPT", 1)
    source = SimulatedStream(config(), 1)
    whole = lines(source, 0, 0, 5 * CHUNK_EVENTS)
    assert lines(source, 0, 500, 3500) == whole[500:3500]
    assert len(source._chunks) == 1


def test_events_are_shared_out_over_partitions_and_none_is_lost():
    parts = SimulatedStream(config(events=10, partitions=4), 1).partitions(Deadline.after(1))
    assert [part.end for part in parts] == [3, 3, 2, 2] and all(part.final for part in parts)


def test_event_time_goes_on_evenly_a_day_in_so_many_events():
    source = SimulatedStream(config(events=2 * EVENTS_A_DAY, partitions=2), 1)
    times = [json.loads(lines(source, 1, n, n + 1)[0])["ts"] for n in (0, 1, EVENTS_A_DAY // 2)]
    assert times[0] == START_S + 0.864
    assert times[1] - times[0] == pytest.approx(2 * DAY_S / EVENTS_A_DAY, abs=0.002)
    assert times[2] - times[0] == pytest.approx(DAY_S, abs=0.002)
    (block,) = blocks(source, 1, 0, 1)
    assert block.timestamp_ms_E.tolist() == [START_S * 1000 + 864]


def test_a_users_events_are_in_one_partition():
    world = config(partitions=4).world(1)
    assert {int(u) % 4 for u in scene(world, 500, 3).user_E} == {3}


def test_without_an_end_events_arrive_at_their_rate_whatever_they_are(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    source = SimulatedStream(config(events=None, rate=50.0, partitions=2), 1)
    deadline = Deadline(1e9)
    assert not source.bounded
    assert [part.end for part in source.partitions(deadline)] == [0, 0]
    now_s += 3.0
    assert [(part.end, part.final) for part in source.partitions(deadline)] == [(75, False)] * 2
    assert lines(source, 0, 0, 75) == lines(SimulatedStream(config(partitions=2), 1), 0, 0, 75)


def test_a_bounded_stream_with_a_rate_is_final_once_all_has_arrived(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    source = SimulatedStream(config(events=100, rate=50.0, partitions=1), 1)
    now_s += 1.0
    assert [(part.end, part.final) for part in source.partitions(Deadline(1e9))] == [(50, False)]
    now_s += 9.0
    assert [(part.end, part.final) for part in source.partitions(Deadline(1e9))] == [(100, True)]


def test_arrival_goes_on_behind_what_an_earlier_run_saw(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    source = SimulatedStream(config(events=None, rate=50.0, partitions=2), 1)
    source.commit({"simulated/0": 500, "simulated/1": 490}, Deadline(1e9))
    assert source.partitions(Deadline(1e9))[0].end == 500
    now_s += 1.0
    assert source.partitions(Deadline(1e9))[0].end == 525


def test_a_stream_without_end_or_rate_is_refused():
    with pytest.raises(SpecError, match="needs a rate"):
        validate(SimulatedSource, {"kind": "simulated"})


def test_a_negative_position_is_a_gap():
    with pytest.raises(SourceGap):
        blocks(SimulatedStream(config(), 1), 0, -1, 5)


def test_clicks_follow_what_a_model_can_learn():
    seen = scene(config(users=1000, items=500).world(1), 20_000)
    assert 0.1 < seen.clicked_ES.mean() < 0.3
    assert 0.80 < auc(seen.clicked_ES.ravel(), seen.logit_ES.ravel()) < 0.88


def test_what_an_item_earned_lately_tells_what_it_earns_next():
    """The least a learner can do: rank by the mean of each item so far. A frozen mean does worse later."""
    seen = scene(config(users=1000, items=200, item_life=100_000, partitions=1).world(3), 120_000)
    item, clicked = seen.item_ES.ravel(), seen.clicked_ES.ravel()
    span = len(item) // 6

    def means_of(part: int):
        part = slice(part * span, (part + 1) * span)
        top = int(item.max()) + 1
        shows = np.bincount(item[part], minlength=top) + 20
        return (np.bincount(item[part], clicked[part], minlength=top) + 20 * clicked.mean()) / shows

    def auc_of(part: int, means) -> float:
        part = slice(part * span, (part + 1) * span)
        return auc(clicked[part], means[item[part]])

    fresh, frozen = auc_of(5, means_of(4)), auc_of(5, means_of(0))
    assert fresh > 0.64 and frozen < fresh - 0.03


def test_items_are_born_and_die_and_as_many_live_at_any_time():
    world = config(items=50, item_life=1000, partitions=1).world(1)
    early, late = (scene(world, n).item_ES[n - 500 :] for n in (500, 20_000))
    assert not set(early.ravel()) & set(late.ravel())
    assert len(set(late.ravel())) <= 50 * 3


def test_without_drift_tastes_stand_still():
    user, device, hour, item = (np.arange(50, dtype=np.int64) % n for n in (50, 4, 24, 50))
    for drift, same in ((0.0, True), (1.0, False)):
        world = config(drift=drift).world(1)
        first, later = (world.logit(user, device, hour, item[:, None], np.full(50, day)) for day in (0.0, 3.0))
        assert np.allclose(first, later) == same


def test_jobs_that_know_since_when_a_stream_flows_see_it_alike_whenever_they_open_it(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "time", lambda: 1_000.0)

    def end(since):
        source = SimulatedStream(config(events=None, rate=50.0, partitions=1, since=since), 1)
        return source.partitions(Deadline(1e9))[0].end

    assert (end(940.0), end(998.0), end(2_000.0)) == (3_000, 100, 0)
