from hypothesis import example, given
from hypothesis import strategies as st

from dataset.paths import Pattern, natural, open_folders


def made(tmp_path, *names: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")


def test_numbers_are_ordered_as_numbers():
    assert sorted(["part-10", "part-9", "part-1"], key=natural) == ["part-1", "part-9", "part-10"]


@given(st.text(max_size=20), st.text(max_size=20))
@example("²", "2")
@example("٣", "3")
def test_any_two_names_can_be_ordered(one, other):
    assert (natural(one) < natural(other)) + (natural(other) < natural(one)) == (natural(one) != natural(other))


def test_a_glob_finds_files_in_order_and_no_folders(tmp_path):
    made(tmp_path, "logs/b.jsonl", "logs/a10.jsonl", "logs/a9.jsonl", "logs/c.txt", "logs/d.jsonl/x")
    assert Pattern("logs/*.jsonl").matches(tmp_path) == ["logs/a9.jsonl", "logs/a10.jsonl", "logs/b.jsonl"]


def test_two_stars_look_into_every_folder(tmp_path):
    made(tmp_path, "logs/a", "logs/x/b", "logs/x/y/c")
    assert Pattern("logs/**/*").matches(tmp_path) == ["logs/a", "logs/x/b", "logs/x/y/c"]


def test_an_absolute_pattern_keeps_its_paths(tmp_path):
    made(tmp_path, "a.txt")
    assert Pattern(f"{tmp_path}/*.txt").matches(tmp_path / "elsewhere") == [f"{tmp_path}/a.txt"]


def test_fields_order_files_before_their_names(tmp_path):
    made(tmp_path, "a/day=2/1.txt", "b/day=1/9.txt", "b/day=10/0.txt")
    found = Pattern("*/day={day}/*.txt").matches(tmp_path)
    assert found == ["b/day=1/9.txt", "a/day=2/1.txt", "b/day=10/0.txt"]


def test_a_field_that_stands_twice_has_one_value(tmp_path):
    made(tmp_path, "1/log-1.txt", "1/log-2.txt", "2/log-2.txt")
    assert Pattern("{day}/log-{day}.txt").matches(tmp_path) == ["1/log-1.txt", "2/log-2.txt"]


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
