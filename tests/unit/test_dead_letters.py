"""Dead letters: published at a close, replaced when a pass is run again; and the limit on what may be rejected."""

import base64
import json

import pytest

from headrace.dataset.loader.dead_letters import BadFraction, DeadLetters, encode_letter
from headrace.dataset.samples.rejection import Reason, Rejection
from headrace.dataset.spec.config import DeadLettersSection
from headrace.dataset.stream.errors import TooManyBadEvents
from headrace.durable import SymbolicLinkFound


def rejection(offset: int, data: bytes | None = b"\xffoops", line: int | None = None) -> Rejection:
    return Rejection("topic/3", offset, Reason.UNPARSABLE, "slot 'C1'", data, line)


def letters(tmp_path, rank: int = 0, **settings) -> DeadLetters:
    return DeadLetters(tmp_path / "dead_letters", rank, DeadLettersSection(**settings))


def offsets(path) -> list[int]:
    return [json.loads(line)["offset"] for line in path.read_text().splitlines()]


def test_a_letter_is_a_line_of_json():
    assert json.loads(encode_letter(rejection(7), keep_bytes=True)) == {
        "partition": "topic/3",
        "offset": 7,
        "reason": "unparsable",
        "detail": "slot 'C1'",
        "bytes": base64.b64encode(b"\xffoops").decode(),
    }
    assert json.loads(encode_letter(rejection(7, None, 4), keep_bytes=True))["line"] == 4


def test_private_data_is_not_kept():
    kept = json.loads(encode_letter(rejection(7), keep_bytes=False))
    assert kept == {"partition": "topic/3", "offset": 7, "reason": "unparsable"}


def test_nothing_is_visible_before_the_close(tmp_path):
    dead = letters(tmp_path)
    dead.begin(4)
    assert dead.add(4, [rejection(1), rejection(2)]) == 2
    assert not list((tmp_path / "dead_letters").glob("*.jsonl"))
    path = dead.publish(4)
    assert path == dead.path(4) and offsets(path) == [1, 2]
    assert [each.name for each in (tmp_path / "dead_letters").iterdir()] == ["pass-000000000004-rank-0.jsonl"]


def test_a_pass_run_again_replaces_its_letters(tmp_path):
    dead = letters(tmp_path)
    dead.add(4, [rejection(1)])
    dead.publish(4)
    dead.begin(4)
    dead.add(4, [rejection(2)])
    dead.begin(4)  # the reading of this pass began anew
    dead.add(4, [rejection(3)])
    assert offsets(dead.publish(4)) == [3]
    dead.begin(4)
    assert dead.publish(4) is None
    assert not dead.path(4).exists()


def test_a_generation_that_ends_leaves_the_letters_of_the_next_one(tmp_path):
    """It may have read the pass ahead that the next one begins with."""
    old, new = letters(tmp_path), letters(tmp_path)
    old.begin(4)
    old.add(4, [rejection(1)])
    new.begin(4)
    new.add(4, [rejection(2)])
    old.add(4, [rejection(3)])
    old.close()
    assert offsets(new.publish(4)) == [2]
    assert [each.name for each in (tmp_path / "dead_letters").iterdir()] == ["pass-000000000004-rank-0.jsonl"]


def test_passes_may_overlap_and_ranks_do_not_meet(tmp_path):
    one, two = letters(tmp_path, 0), letters(tmp_path, 1)
    one.add(4, [rejection(1)])
    one.add(5, [rejection(2)])
    two.add(4, [rejection(3)])
    assert [offsets(dead.publish(4)) for dead in (one, two)] == [[1], [3]]
    assert offsets(one.publish(5)) == [2]


def test_a_pass_without_letters_makes_no_file_and_no_folder(tmp_path):
    dead = letters(tmp_path)
    dead.begin(1)
    assert dead.publish(1) is None and not (tmp_path / "dead_letters").exists()


def test_letters_of_a_pass_are_bounded(tmp_path):
    dead = letters(tmp_path, max_per_pass=2)
    assert dead.add(1, [rejection(1)]) == 1
    assert dead.add(1, [rejection(2), rejection(3)]) == 1
    assert offsets(dead.publish(1)) == [1, 2]


def test_old_files_of_this_rank_are_deleted(tmp_path):
    dead, other = letters(tmp_path, 0, keep_passes=2), letters(tmp_path, 1, keep_passes=2)
    other.add(1, [rejection(0)])
    other.publish(1)
    for number in (1, 2, 3):
        dead.add(number, [rejection(number)])
        dead.publish(number)
    assert [dead.path(number).exists() for number in (1, 2, 3)] == [False, True, True]
    assert other.path(1).exists()


def test_closing_leaves_nothing_half_written(tmp_path):
    dead = letters(tmp_path)
    dead.add(1, [rejection(1)])
    dead.close()
    assert not list((tmp_path / "dead_letters").iterdir())


# -- the limit


def test_too_many_bad_events_stop_the_job_and_name_the_commonest_reasons():
    bad = BadFraction(0.01)
    bad.add(5000, {"unparsable": 20, "label missing": 10})
    with pytest.raises(TooManyBadEvents, match=r"80 of the last 5500 .*unparsable \(70\), label missing \(10\)"):
        bad.add(500, {"unparsable": 50})


def test_a_rejection_for_the_commonest_reason_is_told_also_of_an_earlier_pass():
    bad = BadFraction(0.01)
    bad.add(1000, {"unparsable": 9}, {"unparsable": "t/0 at 3: unparsable: slot 'user': 'u3'"})
    with pytest.raises(TooManyBadEvents, match=r"too long \(8\), for example t/0 at 3: .* 'u3'; look at"):
        bad.add(500, {"too long": 8}, {"too long": "t/0 at 1001"})


def test_nothing_is_said_before_a_thousand_events():
    bad = BadFraction(0.01)
    bad.add(999, {"unparsable": 999})
    with pytest.raises(TooManyBadEvents):
        bad.add(1, {})


def test_only_the_last_ten_thousand_events_count():
    bad = BadFraction(0.01)
    bad.add(990, {"unparsable": 9})
    bad.add(9_000, {"unparsable": 90})
    bad.add(10_000, {"unparsable": 100})
    with pytest.raises(TooManyBadEvents, match="101 of the last 10000"):
        bad.add(10_000, {"unparsable": 101})


def test_a_limit_of_1_never_stops_and_one_of_0_at_the_first():
    BadFraction(1.0).add(5000, {"unparsable": 5000})
    with pytest.raises(TooManyBadEvents):
        BadFraction(0.0).add(5000, {"unparsable": 1})


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_folder_that_is_a_link_is_refused_and_nothing_is_written_behind_it(tmp_path, when):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "dead_letters"
    elsewhere.mkdir()
    letters = DeadLetters(folder, 0, DeadLettersSection())
    if when == "between":
        letters.begin(1)
    folder.symlink_to(elsewhere)
    with pytest.raises(SymbolicLinkFound, match="dead_letters is a symbolic link"):
        letters.begin(1) if when == "before" else letters.add(1, [rejection(7)])
    assert list(elsewhere.iterdir()) == []
