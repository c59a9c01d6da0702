import glob
import os
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.config import validate
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.spec.path_pattern import MAX_FIELDS, MAX_WILDCARDS, Pattern, natural_key, open_folders
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, SpecError
from headrace.trainer.predict.config import InputSection


def made(tmp_path, *names: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")


def test_numbers_are_ordered_as_numbers():
    assert sorted(["part-10", "part-9", "part-1"], key=natural_key) == ["part-1", "part-9", "part-10"]


@given(st.text(max_size=20), st.text(max_size=20))
@example("²", "2")
@example("٣", "3")
def test_any_two_names_can_be_ordered(one, other):
    assert (natural_key(one) < natural_key(other)) + (natural_key(other) < natural_key(one)) == (
        natural_key(one) != natural_key(other)
    )


def test_a_glob_finds_files_in_order_and_no_folders(tmp_path):
    made(tmp_path, "logs/b.jsonl", "logs/a10.jsonl", "logs/a9.jsonl", "logs/c.txt", "logs/d.jsonl/x")
    assert Pattern("logs/*.jsonl").matches(tmp_path) == ["logs/a9.jsonl", "logs/a10.jsonl", "logs/b.jsonl"]


def test_two_stars_look_into_every_folder(tmp_path):
    made(tmp_path, "logs/a", "logs/x/b", "logs/x/y/c")
    assert Pattern("logs/**/*").matches(tmp_path) == ["logs/a", "logs/x/b", "logs/x/y/c"]


def test_an_absolute_pattern_keeps_its_paths(tmp_path):
    made(tmp_path, "a.txt")
    for pattern in (f"{tmp_path}/*.txt", f"/{tmp_path}/*.txt"):
        assert Pattern(pattern).matches(tmp_path / "elsewhere") == [pattern.replace("*", "a")]


def test_fields_order_files_before_their_names(tmp_path):
    made(tmp_path, "a/day=2/1.txt", "b/day=1/9.txt", "b/day=10/0.txt")
    found = Pattern("*/day={day}/*.txt").matches(tmp_path)
    assert found == ["b/day=1/9.txt", "a/day=2/1.txt", "b/day=10/0.txt"]


def test_a_field_that_stands_twice_has_one_value(tmp_path):
    made(tmp_path, "1/log-1.txt", "1/log-2.txt", "2/log-2.txt")
    assert Pattern("{day}/log-{day}.txt").matches(tmp_path) == ["1/log-1.txt", "2/log-2.txt"]


def test_a_field_that_stands_twice_has_the_value_of_the_part_with_the_fewest_wildcards():
    pattern = Pattern("{country}-{day}/{day}.txt")
    assert pattern.values("us-2024-01-02/2024-01-02.txt") == {"country": "us", "day": "2024-01-02"}
    assert Pattern("{day}/**/{part}-{day}.txt").values("1-2/a/b/3-1-2.txt") == {"day": "1-2", "part": "3"}
    assert Pattern("**/{day}/**/x-{day}.txt").values("a/1/b/x-1.txt") == {"day": "1"}
    assert Pattern("{day}/{day}-*.txt").values("1/2-3.txt") is None


def as_regex(pattern: str) -> str:
    """What a pattern means, written as a regular expression; it takes exponential time."""
    parts = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\{\w+\}|\*\*/|\*|\?|\[[^\]]*\])", pattern)
    texts = [
        f"(?P<{token[1:-1]}>[^/]*)"
        if token.startswith("{")
        else token.replace("[!", "[^")
        if token.startswith("[")
        else parts.get(token, re.escape(token))
        for token in tokens
    ]
    return "".join(texts)


PIECES = ["a", "b", "ab", "-", "*", "?", "[a-b]", "[!a]", "/", "/**/", "{x}", "{y}", "{z}"]
TEXTS = st.lists(st.sampled_from(["a", "b", "ab", "-", "/"]), max_size=12).map("".join)


def plain(path: str) -> bool:
    """Without the empty parts that a glob passes over, and without stars side by side, which mean one."""
    return not path.startswith("/") and "//" not in path and "/**/**" not in path


@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=9, unique_by=lambda piece: piece if "{" in piece else id),
    TEXTS,
)
@example(["{x}", "-", "{y}"], "a-b-a")
@example(["{x}", "{y}"], "ab")
@example(["{x}", "/**/", "{y}", "*"], "a/b/ab/a")
@example(["*", "?", "a", "{x}"], "baaab")
def test_fields_have_the_values_that_a_greedy_regular_expression_gives(pieces, path):
    pattern = "".join(pieces)
    if not plain(pattern) or not plain(path) or "***" in pattern:
        return
    match = re.fullmatch(as_regex(pattern), path, re.DOTALL)
    assert Pattern(pattern).values(path) == (None if match is None else match.groupdict())


GLOBS = ["*", "**/*", "**/a*", "*/*/*", "[!b]*", "a?/**/*", ".h/*", "**/.h*", "x/**/y/*", "x/y/b", "./x/*", "x/../a*"]


@pytest.mark.parametrize(
    "pattern", [*GLOBS, "**", "x/**", "**/**/*", "x//y/*", "x//*/b", "x//**", "[*]", "[", "a[", "x/", "**/x/../a"]
)
def test_a_pattern_finds_what_a_glob_finds(tmp_path, pattern):
    made(tmp_path, "a", "ab", "b", ".h", "x/a", "x/y/b", "x/.h", "x/y/z/a", "ac/x/a", "[", "*", "a[")
    made(tmp_path, "c/.hidden/a")
    found = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    files = {path for path in found if os.path.isfile(tmp_path / path)}
    if pattern == "**/x/../a":  # behind stars, only names that are in the folder count
        files = set()
    assert set(Pattern(pattern).find(tmp_path)) == files


def test_names_of_writers_own_match_only_where_the_pattern_names_them(tmp_path):
    """As for Spark: "_temporary" is the folder of a task that has not ended."""
    shown = ["a.jsonl", "_day=7/a.jsonl", "x/a_b.jsonl"]
    hidden = ["_x.jsonl", "_temporary/0/a.jsonl", "x/_tmp.jsonl", "x/.part.jsonl"]
    made(tmp_path, *shown, *hidden)
    for pattern, files in (
        ("**/*.jsonl", shown),
        ("**", shown),
        ("{name}.jsonl", ["a.jsonl"]),
        ("_x.jsonl", ["_x.jsonl"]),
        ("_*.jsonl", ["_x.jsonl"]),
        ("_temporary/**/*.jsonl", ["_temporary/0/a.jsonl"]),
        ("*/_*.jsonl", ["x/_tmp.jsonl"]),
        ("*/.*.jsonl", ["x/.part.jsonl"]),
    ):
        assert set(Pattern(pattern).find(tmp_path)) == set(files), pattern
        assert {path for path in shown + hidden if Pattern(pattern).finds(path)} == set(files), pattern


def test_a_folder_in_which_a_name_is_given_is_not_listed(tmp_path, monkeypatch):
    made(tmp_path, "x/y/a.txt")
    monkeypatch.delattr(os, "scandir")
    assert list(Pattern("x/y/a.txt").find(tmp_path)) == ["x/y/a.txt"]


@pytest.mark.parametrize(
    "pattern",
    ["".join(f"{{a{n}}}" for n in range(78)) + "b", "**/" * 40 + "x", "*a" * 100 + "b", "[ab]*" * 100 + "c"],
)
def test_no_pattern_takes_exponential_time(tmp_path, pattern):
    name = "a" * 200
    deep = tmp_path.joinpath(*["d"] * 30)
    deep.mkdir(parents=True)
    (deep / name).touch()
    (tmp_path / name).touch()
    began_s = time.process_time()
    assert Pattern(pattern).matches(tmp_path) == []
    assert Pattern(pattern).values("d/" * 30 + name) is None
    assert time.process_time() - began_s < 2


def test_links_that_lead_round_are_followed_once(tmp_path):
    made(tmp_path, "x/a.txt")
    for name in ("back", "again", "once_more"):
        (tmp_path / "x" / name).symlink_to(tmp_path)
    assert list(Pattern("**/a.txt").find(tmp_path)) == ["x/a.txt"]
    assert list(Pattern("x/back/x/back/x/*.txt").find(tmp_path)) == ["x/back/x/back/x/a.txt"]


def test_looking_ends_at_the_deadline(tmp_path):
    made(tmp_path, *(f"{number}/a" for number in range(20)))
    with pytest.raises(DeadlineExceeded, match="listing"):
        list(Pattern("*/a").find(tmp_path, Deadline.after(0)))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("".join(f"{{a{n}}}-" for n in range(MAX_FIELDS + 1)), "has 17 fields; a pattern has at most 16"),
        ("**/" * (MAX_WILDCARDS + 1) + "x", "has 33 wildcards"),
        ("*a" * (MAX_WILDCARDS + 1), "has 33 wildcards"),
        ("a" * 5000, "has 5000 characters"),
    ],
)
def test_a_pattern_with_too_many_wildcards_is_refused_by_name(pattern, said):
    with pytest.raises(SpecError, match=f"paths.1: .*{re.escape(said)}"):
        validate(FilesSource, {"kind": "files", "paths": ["a", pattern]})
    with pytest.raises(SpecError, match=f"paths.0: .*{re.escape(said)}"):
        validate(InputSection, {"paths": [pattern]})


def test_a_folder_goes_down_to_the_last_field():
    assert Pattern("logs/{day}/{hour}/*.jsonl").folder("logs/3/12/x.jsonl") == "logs/3/12"
    assert Pattern("logs/{day}/part/*.jsonl").folder("logs/3/part/x.jsonl") == "logs/3"
    assert Pattern("logs/{day}/**/*.jsonl").folder("logs/3/a/b/x.jsonl") == "logs/3"
    assert Pattern("logs/*/*.jsonl").folder("logs/3/x.jsonl") == "logs/3"


HOURS = Pattern("logs/{hour}/*")
PATHS = ["logs/1/a", "logs/2/a", "logs/3/a"]


def opening(marked, opened=(), known=(), *, paths=PATHS, in_turn=True):
    return open_folders(HOURS, paths, set(marked), set(opened), set(known), in_turn=in_turn)


def test_folders_open_in_order_once_their_marker_is_there():
    assert opening(["logs/1", "logs/2"]).files == ("logs/1/a", "logs/2/a")


def test_a_folder_without_its_marker_holds_back_those_after_it():
    decided = opening(["logs/1", "logs/3"])
    assert (decided.files, decided.waiting) == (("logs/1/a",), ("logs/2",))


def test_a_bounded_source_passes_over_what_is_not_ready():
    decided = opening(["logs/1", "logs/3"], in_turn=False)
    assert (decided.files, decided.waiting) == (("logs/1/a", "logs/3/a"), ("logs/2",))


def test_a_file_in_an_opened_folder_is_late():
    paths = ["logs/1/a", "logs/1/b"]
    decided = opening(["logs/1"], opened=["logs/1"], known=["logs/1/a"], paths=paths)
    assert (decided.files, decided.late) == ((), ("logs/1/b",))


def test_a_late_file_is_found_once():
    assert opening([], opened=["logs/1"], known=["logs/1/b"], paths=["logs/1/b"]).late == ()


def test_a_folder_that_appears_behind_those_opened_is_opened_all_the_same():
    assert opening(["logs/1"], opened=["logs/2"], known=["logs/2/a"], paths=PATHS[:2]).files == ("logs/1/a",)
