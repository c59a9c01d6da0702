"""`headrace spec infer`: what it makes of events, and that what it proposes loads."""

import gzip
import json
import math
import random
import re
import tomllib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.dataset.sources.event_time import event_times
from headrace.dataset.stream.source import Events
from headrace.errors import BadInput
from headrace.service.cli import main
from headrace.service.planning.event_sample import EventSample
from headrace.service.planning.field_facts import MAX_CHILDREN, observe_events
from headrace.service.planning.field_roles import FieldRole, decide, find_label
from headrace.service.planning.job_text import infer_job
from headrace.service.spec.job import job_of


def roles_of(*events):
    return decide(observe_events(iter(events)))


def readings(*events):
    return {each.facts.path: each for each in roles_of(*events).readings}


def proposed(tmp_path, events, name="events.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return infer_job(EventSample(path, 10_000), tmp_path)


def impressions(num=120):
    rng = random.Random(1)
    for number in range(num):
        shown = rng.sample(range(50), 5)
        yield {
            "ts": 1_700_000_000 + number,
            "impression": number,
            "user": {"id": rng.randrange(40), "country": rng.choice(["de", "dk"])},
            "shown": shown,
            "clicked": rng.sample(shown, 1),
            "title": "one or two words more",
            "price": rng.expovariate(0.01),
            "version": 3,
        }


def test_a_news_page_becomes_a_job(tmp_path):
    proposal = proposed(tmp_path, impressions())
    assert proposal.missing == ()
    job = job_of(tomllib.loads(proposal.text), tmp_path).spec
    slots = {slot.name: slot for slot in job.slots}
    assert job.pipe.explode == "shown"
    assert (slots["in_clicked"].kind, slots["in_clicked"].members) == ("meta", "clicked")
    assert job.tasks[0].label == "in_clicked"
    assert job.sources["events"].event_time.field == "ts"
    assert (job.sample.group, job.metrics.gauc_by) == ("impression", "impression")
    assert slots["user.country"].values == "string"
    assert slots["shown_user.country"].cross == ("shown", "user.country")
    assert slots["price"].kind == "dense"
    assert slots["hour"].source == "ts"
    assert {"version", "impression"} & {slot.name for slot in job.slots if slot.kind != "meta"} == set()
    assert '# "user.country": text, in every event, 2 distinct, such as "d' in proposal.text


TIMES = {
    # ratings of 1997, as a well-known data set has them; then other ways to write a time
    "timestamp": [874_724_710, 891_717_742, 878_887_116],
    "rated_at": [874_724_710_000, 874_724_711_000, 874_724_712_000],
    "created": ["1997-09-20T03:05:10Z", "1997-09-21T03:05:10Z", "1998-01-01T00:00:00Z"],
    "day": ["1997-09-20", "1997-09-21", "1997-09-22"],
}


@pytest.mark.parametrize("name", TIMES)
def test_times_before_2000_in_words_and_inside_an_object_are_the_time_of_events(tmp_path, name):
    for nested in (False, True):
        times = [{"meta": {name: each}} if nested else {name: each} for each in TIMES[name]]
        proposal = proposed(tmp_path, [{"user": n, "rating": n % 2, **time} for n, time in enumerate(times)])
        job = job_of(tomllib.loads(proposal.text), tmp_path).spec
        path = f"meta.{name}" if nested else name
        time = job.sources["events"].event_time
        assert (time.field, time.unit) == (path, "ms" if name == "rated_at" else "s")
        hour = next(slot for slot in job.slots if slot.name == "hour")
        assert (hour.source, hour.time) == (path, "hour")
        found = event_times(time, Events.of([json.dumps(each).encode() for each in times], range(len(times))))
        assert 874_000_000 < found.min() <= found.max() < 900_000_000, "and they are read as times of that year"


def test_numbers_below_those_of_times_are_ids_unless_named_so(tmp_path):
    events = [{"item": 874_724_710 + n, "click": n % 2} for n in range(20)]
    assert roles_of(*events).time is None
    assert roles_of(*({"item_time": each["item"]} for each in events)).time[:2] == ("item_time", "s")


def test_objects_in_a_list_are_exploded(tmp_path):
    events = [
        {"user": 1 + n % 3, "items": [{"id": n % 7, "price": n / 4, "clicked": n % 2}, {"id": 2, "clicked": False}]}
        for n in range(20)
    ]
    proposal = proposed(tmp_path, [json.loads(json.dumps(event).replace("false", "0")) for event in events])
    job = job_of(tomllib.loads(proposal.text), tmp_path).spec
    slots = {slot.name: slot for slot in job.slots}
    assert job.pipe.explode == "items"
    assert job.tasks[0].label == "items.clicked"
    assert slots["items.price"].default == 0.0
    assert slots["items.id_user"].cross == ("items.id", "user")


@pytest.mark.parametrize(
    ("values", "role"),
    [
        ([3, 3, 3], FieldRole.CONSTANT),
        ([1, 2, 3], FieldRole.ID),
        ([-1, 2, 3], FieldRole.ID),
        ([0.5, 2, 3], FieldRole.NUMBER),
        ([-10_000, 2, 3], FieldRole.NUMBER),
        ([1000 * (37 * n % 100) for n in range(100)], FieldRole.NUMBER),
        ([7 + n for n in range(100)] * 2, FieldRole.ID),
        ([2**55 + 7 * n * n for n in range(100)] * 2, FieldRole.ID),
        ([2**64, 1], FieldRole.NUMBER),
        ([True, False], FieldRole.ID),
        (["a", "b"], FieldRole.ID),
        ([f"u{n}" for n in range(150)], FieldRole.UNIQUE),
        (["a|b", "c|a", "b"], FieldRole.WORDS),
        (["the cat sat", "on the old mat"], FieldRole.WORDS),
        (["2024-05-02T10:00:00Z", "2024-05-01"], FieldRole.DATE),
        ([1, "a"], FieldRole.MIXED),
        ([None, None], FieldRole.EMPTY),
        ([[1, 2], [1, 3]], FieldRole.ID),
        ([[0.5, 2], [1, 3]], FieldRole.NUMBERS),
        ([[0.5, 2], [1.5]], FieldRole.MIXED),
        ([[[1]], [[2]]], FieldRole.NESTED),
        ([["a"], []], FieldRole.ID),
    ],
)
def test_the_role_of_a_field(values, role):
    assert readings(*({"f": value, "g": n % 2} for n, value in enumerate(values)))["f"].role is role


def test_labels():
    def label(*events):
        found = find_label(observe_events(iter(events)))
        return found and (found.path, found.of)

    assert label({"a": 0, "click": 1}, {"a": 1, "click": 0}) == ("click", None)
    assert label({"a": 0}, {"a": 1}) == ("a", None)
    assert label({"a": 0, "b": 1}, {"a": 1, "b": 0}) is None
    assert label({"s": ["x", "y"], "c": ["x"]}, {"s": ["x", "y"], "c": []}) == ("c", "s")
    assert label({"s": ["x", "y"], "c": ["z"]}, {"s": ["x", "y"], "c": []}) is None
    assert label({"items": [{"id": 1}, {"id": 2}], "clicked": [2]}) == ("clicked", "items.id")


def test_a_mapping_of_ids_is_left_out():
    events = [{"seen": {str(n): 1}, "a": n % 2} for n in range(MAX_CHILDREN + 5)]
    facts = observe_events(iter(events))
    assert list(facts.fields) == ["a"]
    assert facts.mappings == {"seen"}
    assert facts.num_left_out > 0


def test_a_number_greater_than_any_float_is_a_number():
    facts = observe_events({"n": n} for n in (10**400, -(10**400), 3)).fields["n"]
    assert facts.is_whole and (facts.low, facts.high, facts.num_sorted) == (-1e300, 1e300, 2)


def test_a_great_mapping_is_left_out_once_and_not_looked_through_again():
    mapping = {f"k{number}": {"x": 1} if number % 2 else 1 for number in range(30_000)}
    facts = observe_events(iter([{**{f"g{number}": 1 for number in range(900)}, "clicks": mapping}]))
    assert facts.mappings == {"clicks"} and len(facts.fields) == 900
    assert facts.num_left_out > 29_000


def test_lists_are_compared_in_events_that_have_one_of_them():
    events = [{"a": [1], "b": [1, 2]}, {"b": [3]}, {}, {"a": [], "b": []}, {"a": [2], "b": [2]}]
    facts = observe_events(iter(events))
    assert facts.equally_long == {("a", "b"): False, ("b", "a"): False}
    found = {pair: (each.num_within, each.num_judged) for pair, each in facts.members.items()}
    assert found == {("a", "b"): (2, 2), ("b", "a"): (1, 3)}


def test_without_a_label_the_file_says_what_to_fill_in(tmp_path):
    proposal = proposed(tmp_path, [{"a": 1}, {"a": 2}])
    assert len(proposal.missing) == 1
    assert "# FILL IN a slot with kind" in proposal.text
    assert "tasks" not in tomllib.loads(proposal.text)


names = st.text(min_size=1, max_size=6) | st.sampled_from(
    ["id", "ts", "click", "label", "items", "error", "event", "a.b"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, 3)
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from([1_700_000_000, "2024-05-01", "a,b", 'say "hi"\\', "\x7f\u2028"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)
events = st.dictionaries(names, values, max_size=5)


@given(
    st.lists(events | events.map(lambda event: event | {"click": 0, "id": 7}), min_size=1, max_size=6), st.booleans()
)
@example([{"items": [{"id": 1}, {"id": 2}], "clicked": [2], "items.id": 3}], True)
@example([{"shown": ["a", "b"], "clicked": ["a"], "in_clicked": 1, "click": 0}], True)
@example([{"x": -1e300}, {"x": 0.5}, {"x": 1e300}], True)
def test_what_is_proposed_loads_or_says_what_is_missing(tmp_path_factory, drawn, labelled):
    if labelled:
        drawn = [*drawn, {"click": 1, "id": 8}, {"click": 0, "id": 9}]
    folder = tmp_path_factory.getbasetemp()
    proposal = proposed(folder, drawn)
    raw = tomllib.loads(proposal.text)
    if not proposal.missing:
        job_of(raw, folder)


def test_bad_lines_are_counted_and_told(tmp_path, capsys, monkeypatch):
    path = tmp_path / "e.jsonl.gz"
    path.write_bytes(
        gzip.compress(b'\xef\xbb\xbf{"click": 1, "id": 1}\nnot json\n[1]\n\n{"click": 0, "id": 2}\n{"id":')
    )
    out = tmp_path / "job.toml"
    assert run(monkeypatch, "spec", "infer", path, "--out", out) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "2 events read, 3 bad lines" in told.err
    assert "line 2 is not JSON" in told.err and "line 3 is not a JSON object" in told.err
    assert "# 3 lines are no JSON object" in out.read_text()
    assert run(monkeypatch, "spec", "check", out) == 0
    assert run(monkeypatch, "spec", "infer", path, "--out", out) == 2
    assert "exists; name a new file" in capsys.readouterr().err


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["headrace", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main.main()
    return end.value.code


def test_the_sample_ends_at_its_limit(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"a": 1}\nx\n{"a": 2}\n{"a": 3}')
    sample = EventSample(path, 3)
    assert [event["a"] for event in sample] == [1, 2]
    assert (sample.num_events, sample.num_bad, sample.reached_end) == (2, 1, False)
    sample = EventSample(path, 4)
    assert [event["a"] for event in sample] == [1, 2, 3]
    assert sample.reached_end


def test_a_line_that_is_too_long_is_bad(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.service.planning.event_sample.MAX_LINE_BYTES", 20)
    path = tmp_path / "e.jsonl"
    path.write_text('{"a": 1}\n{"a": "' + "x" * 600_000 + '"}\n{"a": 2}\n')
    sample = EventSample(path, 10)
    assert [event["a"] for event in sample] == [1, 2]
    assert sample.bad_lines == ["line 2 is longer than 20 bytes"]


def test_a_line_longer_than_what_is_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.service.planning.event_sample.MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("headrace.service.planning.event_sample.MAX_SAMPLE_BYTES", 300_000)
    path = tmp_path / "e.jsonl"
    path.write_text('{"a": "' + "x" * 900_000 + '"}\n')
    with pytest.raises(BadInput, match="1 lines are none: line 1 is longer than 1,000 bytes"):
        infer_job(EventSample(path, 10), tmp_path)
    path.write_text('{"a": 1}\n' * 100_000)
    sample = EventSample(path, 1_000_000)
    assert 10_000 < len(list(sample)) < 100_000
    assert (sample.num_bad, sample.reached_end) == (0, False)


def test_a_file_without_an_event_is_an_error(tmp_path):
    (tmp_path / "e.jsonl").write_text("x\n")
    with pytest.raises(BadInput, match="has no event: .*1 lines are none: line 1 is not JSON"):
        infer_job(EventSample(tmp_path / "e.jsonl", 10), tmp_path)


def ratings(num=3000):
    """In bursts by user; ids of items have gaps, so that they look like numbers."""
    rng = random.Random(3)
    taste = [rng.gauss(0, 1.5) for _ in range(200)]
    for number in range(num):
        user, item = number // 60, int(200 * rng.random() ** 2)
        if number % 60 == 0:
            mood = rng.gauss(0, 1.5)
        liked = rng.random() < 1 / (1 + math.exp(-mood - taste[item]))
        time = 900_000_000 + 7 * number
        yield {"user": user, "item": item * 991, "timestamp": time, "liked": int(liked)}


def test_what_is_proposed_is_measured(tmp_path):
    path = tmp_path / "ratings.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in ratings()))
    guessed = infer_job(EventSample(path, 3000), tmp_path)
    proposal = infer_job(EventSample(path, 3000), tmp_path, measured=True)
    assert proposal.text == infer_job(EventSample(path, 3000), tmp_path, measured=True).text, "the same each time"
    slots = {slot.name: slot for slot in job_of(tomllib.loads(proposal.text), tmp_path).spec.slots}
    assert '# name = "item"' in proposal.text, "as a number the item says little"
    assert (slots["item_id"].kind, slots["item_id"].source) == ("sparse", "item")
    assert "item" in {slot.name for slot in job_of(tomllib.loads(guessed.text), tmp_path).spec.slots}
    assert "Measured on 3,000 samples" in proposal.text
    assert "train" not in tomllib.loads(proposal.text), "a batch of 256 hides the burst of a user from itself"
    assert re.search(r"# ids: in place of the number: \+0\.\d{4} AUC on 3,000 samples, p 0\.00\d\d\n", proposal.text)


def signed(num=3000):
    """Users with whole numbers below and above 0, which say nothing."""
    rng = random.Random(5)
    for _ in range(num):
        user = rng.randrange(40)
        yield {"user": f"u{user}", "level": rng.randrange(-50, 900), "click": int(rng.random() < user / 40)}


def test_whole_numbers_below_0_are_measured_as_numbers(tmp_path):
    path = tmp_path / "signed.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in signed()))
    text = infer_job(EventSample(path, 3000), tmp_path, measured=True).text
    assert "Measured on 3,000 samples" in text and "Nothing is measured" not in text and "rejects" not in text
    job_of(tomllib.loads(text), tmp_path)


def returning(num=6000):
    """Users that come a few times each: some like many items, all of one kind."""
    rng = random.Random(7)
    for number in range(num):
        user, item = rng.randrange(400), rng.randrange(500)
        likes = (0.05, 0.1) if user % 2 else (0.95, 0.3)
        yield {"user": f"u{user}", "item": f"i{item}", "click": int(rng.random() < likes[item % 2]), "ts": 60 * number}


def test_a_proposed_model_of_sequences_loads(tmp_path, monkeypatch, capsys):
    path, job = tmp_path / "returning.jsonl", tmp_path / "job.toml"
    path.write_text("".join(json.dumps(event) + "\n" for event in returning()))
    text = infer_job(EventSample(path, 6000), tmp_path, measured=True).text
    before, _, rest = text.partition('[model]\nname = "deepfm"')
    block, _, rest = rest.partition("# of sequences compares each")[2].partition("\n\n")
    lines = [line.removeprefix("# ") for line in block.splitlines()[1:]]
    job.write_text("\n".join([before, *lines, "", rest]))
    assert run(monkeypatch, "spec", "check", job) == 0, capsys.readouterr().err
    spec = job_of(tomllib.loads(job.read_text()), tmp_path).spec
    history = next(slot.history for slot in spec.slots if slot.name.endswith("_sequence"))
    assert spec.model.name == "din" and (history.key, history.of) == ("user", "item")


def test_events_that_the_proposed_job_rejects_are_told(tmp_path):
    path = tmp_path / "large.jsonl"
    events = [event | {"price": None if n % 2 else 1e308} for n, event in enumerate(signed())]
    path.write_text("x\n" + "".join(json.dumps(event) + "\n" for event in events))
    text = infer_job(EventSample(path, 4000), tmp_path, measured=True).text
    assert text.startswith('# The job rejects 1,501 of these 3,001 events: "non-finite value 1,500, unparsable 1, for')
    assert "Measured on 1,500 samples" in text
    job_of(tomllib.loads(text), tmp_path)


def test_a_sample_that_is_too_short_is_not_measured(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text("".join(json.dumps({"id": n % 7, "click": n % 2}) + "\n" for n in range(50)))
    text = infer_job(EventSample(path, 50), tmp_path, measured=True).text
    assert text.startswith('# Nothing is measured: "50 samples')
    job_of(tomllib.loads(text), tmp_path)


def test_suggest_reads_the_stream_of_a_job_and_changes_nothing(tmp_path, capsys, monkeypatch):
    path, job = tmp_path / "ratings.jsonl", tmp_path / "job.toml"
    path.write_text("".join(json.dumps(event) + "\n" for event in ratings(1500)))
    job.write_text(infer_job(EventSample(path, 1500), tmp_path).text)
    before = sorted(tmp_path.rglob("*"))
    assert run(monkeypatch, "suggest", job, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["events"], found["samples"], found["rejected"]) == (1500, 1500, 0)
    assert set(found["slots"]) == {"user", "item", "item_step", "hour", "weekday"}
    assert found["slots"]["user"]["auc"] < 0 and not found["slots"]["user"]["drop"]
    assert list(found["admission"]) == ["2", "3", "5", "10"]
    saved = [each["saved"] for each in found["admission"].values()]
    assert saved == [found["rows"] - each["rows"] for each in found["admission"].values()] == sorted(saved)
    assert run(monkeypatch, "suggest", job) == 0
    assert "saves rows" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_suggest_reads_the_newest_events_in_their_order(tmp_path, capsys, monkeypatch):
    """The last 1,500 of four files, of which the first half says something else; the job reads one after another."""
    job, new = tmp_path / "job.toml", list(ratings(1500))
    old = [{**event, "liked": event["user"] % 2} for event in new]
    for name, events in (("new.jsonl", new[4:]), ("all.jsonl", old + new)):
        lines = [json.dumps(event) + "\n" for event in events]
        (tmp_path / name).mkdir()
        for part, begin in enumerate(range(0, len(lines), 750)):
            (tmp_path / name / f"{part}.jsonl").write_text("".join(lines[begin : begin + 750]))
    text = infer_job(EventSample(tmp_path / "new.jsonl" / "0.jsonl", 700), tmp_path).text
    found = []
    for name in ("new.jsonl", "all.jsonl"):
        job.write_text(re.sub(r"paths = .*", f'paths = ["{name}/*.jsonl"]', text))
        assert run(monkeypatch, "suggest", job, "--events", "1500", "--newest", "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["newest"] and found[0]["samples"] == 1496, "8 passes of 187"
    assert found[0] == found[1]


def test_a_measured_page_loads(tmp_path):
    path = tmp_path / "page.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in impressions(400)))
    proposal = infer_job(EventSample(path, 400), tmp_path, measured=True)
    assert "Measured on 2,000 samples" in proposal.text
    job_of(tomllib.loads(proposal.text), tmp_path)
