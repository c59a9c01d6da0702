"""Labels of impressions from the clicks of a whole input, as a plain loop finds them, and quickly for any key."""

from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.predict.joined_labels import CLICKS, KEY, LABEL, TIME, JoinedLabels

TIME_S = st.one_of(st.integers(0, 12).map(float), st.just(float("nan")))
EVENTS = st.lists(st.tuples(st.integers(0, 2), TIME_S), max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


def parts(folder, name, columns):
    """As two files."""
    table = pa.table(columns, schema=pa.schema([CLICKS.field(each) for each in columns]))
    half, files = len(table) // 2, []
    for number, part in enumerate((table[:half], table[half:])):
        files.append(folder / f"{name}-{number}.arrow")
        with pa.OSFile(str(files[-1]), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(part)
    return [nullcontext(file) for file in files]


def joined(folder, impressions, clicks, window_s, check=lambda: None):
    keys, times = ([event[place] for event in impressions] for place in (0, 1))
    click_keys, click_times = ([event[place] for event in clicks] for place in (0, 1))
    labels = np.arange(1, len(clicks) + 1, dtype=np.float32)
    observed = parts(folder, "observed", {KEY: np.array(keys, np.uint64), TIME: np.array(times, np.float64)})
    clicked = {KEY: np.array(click_keys, np.uint64), TIME: np.array(click_times, np.float64), LABEL: labels}
    return JoinedLabels.of(observed, parts(folder, "clicks", clicked), window_s, check)


def plainly(impressions, clicks, window_s):
    """Labels, which impressions count, and the clicks that found one."""
    labels, counts, found = [0.0] * len(impressions), [False] * len(impressions), set()
    since_s = {}
    for place in sorted(
        range(len(impressions)), key=lambda place: (np.isnan(impressions[place][1]), impressions[place][1])
    ):
        key, at_s = impressions[place]
        if np.isnan(at_s):
            continue
        counts[place] = key not in since_s or at_s - since_s[key] > window_s
        if counts[place]:
            since_s[key] = at_s
        near = [(time_s, n) for n, (of, time_s) in enumerate(clicks) if of == key and abs(time_s - at_s) <= window_s]
        if near:
            labels[place] = min(near)[1] + 1.0
            found |= {min(near)[1]} if counts[place] else set()
    return labels, counts, len(found)


@settings(max_examples=60, deadline=None)
@given(impressions=EVENTS, clicks=EVENTS, window_s=st.integers(0, 5).map(float))
def test_a_plain_loop_gives_the_same_labels(folder, impressions, clicks, window_s):
    made = joined(folder, impressions, clicks, window_s)
    assert (made.label_N.tolist(), made.counts_N.tolist(), made.joined) == plainly(impressions, clicks, window_s)
    assert made.clicks == len(clicks)


@pytest.mark.timeout(60)
def test_a_key_of_many_clicks_takes_no_pass_for_each(folder):
    times = [(7, float(second)) for second in range(100_000)]
    made = joined(folder, times, times, 0.0)
    assert made.counts_N.all() and made.label_N.tolist() == list(range(1, 100_001))


def test_it_is_asked_between_files_whether_to_go_on(folder):
    class Cancelled(Exception):
        pass

    asked = []

    def check():
        asked.append(None)
        if len(asked) == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        joined(folder, [(1, 1.0)], [(1, 1.0)], 1.0, check)
