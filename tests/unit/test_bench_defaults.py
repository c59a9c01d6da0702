"""The bench of defaults: what it changes in a job, and what it prints."""

import pytest

from headrace.config import validate
from headrace.trainer.config import TrainerJob
from headrace.trainer.spec.defaults import fill_defaults, rows_learn
from tests.bench.defaults import (
    BEGIN,
    CHANGED,
    CHANGES,
    END,
    HINDSIGHT,
    LINEAR,
    NEWEST,
    PAGE,
    SETS,
    changes_of,
    lines_of,
    tables_of,
)
from tests.bench.model_figures import merge
from tests.bench.streams import STREAMS, spec_of
from tests.bench.zoo import Zoo


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_differs_from_all_defaults_in_one_place(name, tmp_path):
    raw = spec_of("clicks", tmp_path)
    before = dict(leaves(fill_defaults({**raw, "defaults": 5})))
    merge(raw, {"defaults": 5, **changes_of(6)[name]})
    validate(TrainerJob, raw)
    after = dict(leaves(fill_defaults(raw)))
    assert before.keys() == after.keys()
    assert len([path for path in before if before[path] != after[path]]) == 1


def leaves(value, path=()):
    """Each value of a spec that is no section, with its path."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    else:
        yield path, value


def test_what_is_held_out_is_measured_without_changes(tmp_path):
    zoo = Zoo(tmp_path)
    assert [name for name, _ in lines_of("videos", zoo, changed=True)] == [*SETS, *LINEAR, HINDSIGHT]
    assert [name for name, _ in lines_of("clicks", zoo, changed=True)] == [*SETS, *CHANGES, *LINEAR]


def test_the_tables_have_each_figure_and_each_change_as_a_difference():
    found = dict.fromkeys([*SETS, *LINEAR], {"auc": 0.5}) | dict.fromkeys((CHANGED, NEWEST), {"auc": 0.75})
    some = {"linear": {"auc": 0.5}}
    text = tables_of({"clicks": {**found, CHANGES[0]: {"auc": 0.7}}, "rare": found, "news": some})
    assert "| clicks | 0.5000 | 0.7500 | 0.5000 | 0.7500 | 0.5000 | 0.5000 | - |" in text
    assert "| rare, held out | 0.5000 |" in text and "news" not in text
    assert f"| {CHANGES[0]} | -0.0500 |" in text and CHANGES[1] not in text
    assert len(tables_of({"rare": found}).split("\n\n")) == 2  # no changes, no second table


def test_the_page_has_a_line_for_each_stream_and_set():
    text = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert all(f"| {stream}" in text for stream in STREAMS)
    assert f"| | {' | '.join([*SETS, *LINEAR, HINDSIGHT])} |" in text


def test_the_rates_that_are_changed_are_those_of_the_number_of_slots():
    table = changes_of(40)["rate of vectors x 2"]["tables"]["default"]
    assert table["optimizer"]["lr"] == 2 * rows_learn(40)["optimizer"]["lr"]
    assert table["first_order_optimizer"] == rows_learn(40)["first_order_optimizer"]
