"""The output of a launcher: its file stays short and keeps the end."""

import threading

from headrace.service.jobs.output_files import emptied_file, shorten, shortened_periodically


def test_its_end_is_kept_in_whole_lines_and_what_is_printed_later_follows_it(tmp_path):
    path = tmp_path / "launcher.out"
    with emptied_file(path) as printed:
        for number in range(1000):
            printed.write(b"line %d\n" % number)
        shorten(path, 100)
        printed.write(b"later\n")
    lines = path.read_text().splitlines()
    assert lines[-3:] == ["line 998", "line 999", "later"]
    assert len(lines) == 6 and all(line.startswith("line ") for line in lines[:-1])


def test_what_is_short_is_left_as_it_is(tmp_path):
    path = tmp_path / "launcher.out"
    with emptied_file(path) as printed:
        printed.write(b"x" * 100)
    shorten(path, 100)
    assert path.read_bytes() == b"x" * 100


def test_a_launcher_begins_with_an_empty_one_for_its_owners_eyes(tmp_path):
    path = tmp_path / "launcher.out"
    with emptied_file(path) as printed:
        printed.write(b"of the one before\n")
    with emptied_file(path):
        assert path.stat().st_size == 0 and path.stat().st_mode & 0o777 == 0o600


def test_it_is_looked_after_while_it_is_printed_to_and_not_afterwards(tmp_path):
    path = tmp_path / "launcher.out"
    threads = threading.active_count()
    with emptied_file(path) as printed, shortened_periodically(path, 1000, look_s=0.001):
        written = printed.write(b"again and again\n")
        while path.stat().st_size == written:
            written += printed.write(b"again and again\n")
    assert threading.active_count() == threads
