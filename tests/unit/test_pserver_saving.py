"""Saves on disk: whole or absent, refused when they do not fit or are damaged."""

import json

import numpy as np
import pytest

from pserver.client import Gradients
from pserver.config import Adagrad, Adam, TableSection
from pserver.errors import BadSave
from pserver.saving import check_header, new_save, read_parts, write_part
from pserver.table import Table, frozen

SECTIONS = {"t": TableSection(dim=2)}


def everything(keys_U):
    return np.ones(len(keys_U), bool)


def a_table(count=10):
    table = Table("t", SECTIONS["t"], 1)
    keys_U = np.arange(1, count + 1, dtype=np.uint64) << np.uint64(40)
    rows = frozen(table.reserve(keys_U, np.zeros(count, np.uint16)))
    one = frozen(np.ones(count, np.float32))
    table.apply(rows, Gradients(frozen(np.ones((count, 3), np.float32)), one, one), 1, 1)
    return table


@pytest.fixture
def save(tmp_path):
    with new_save(tmp_path / "save", SECTIONS, 1) as unfinished:
        write_part(unfinished, 0, {"t": a_table()})
    return tmp_path / "save"


def load(folder, section=SECTIONS["t"], mine=everything):
    table = Table("t", section, 1)
    read_parts(folder, {"t": table}, mine)
    return table


def test_what_is_loaded_is_what_was_saved(save):
    assert load(save).digest() == a_table().digest()
    assert sorted(path.name for path in save.parent.iterdir()) == ["save"]


def test_only_the_rows_asked_for_are_loaded(save):
    assert load(save, mine=lambda keys_U: keys_U > np.uint64(4 << 40)).num_rows == 6


def test_nothing_in_it_is_pickled_and_all_is_listed(save):
    names = {path.name for path in (save / "part-0" / "t").iterdir()}
    columns = {"keys", "show", "click", "delta_score", "last_seen_day", "changed_version", "group", "slab"}
    assert names == {f"{column}.npy" for column in columns} | {"rows.json"}
    for column in columns:
        np.load(save / "part-0" / "t" / f"{column}.npy", allow_pickle=False)
    header = json.loads((save / "save.json").read_text())
    layout = {"dim": 2, "first_order": True, "optimizer": "adagrad by row"}
    assert header == {"format": 1, "parts": 1, "tables": {"t": layout}}


def test_an_empty_table_is_saved_and_loaded(tmp_path):
    with new_save(tmp_path / "save", SECTIONS, 1) as unfinished:
        write_part(unfinished, 0, {"t": Table("t", SECTIONS["t"], 1)})
    assert load(tmp_path / "save").num_rows == 0


def test_a_save_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_save(tmp_path / "save", SECTIONS, 1) as unfinished:
        write_part(unfinished, 0, {"t": a_table()})
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_is_replaced(tmp_path):
    (tmp_path / "save.unfinished" / "part-0").mkdir(parents=True)
    with new_save(tmp_path / "save", SECTIONS, 1) as unfinished:
        write_part(unfinished, 0, {"t": a_table()})
    assert load(tmp_path / "save").num_rows == 10


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(BadSave, match=r"file/save: cannot be written"),
        new_save(tmp_path / "file" / "save", SECTIONS, 1),
    ):
        pass


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (TableSection(dim=3), "'dim': 3"),
        (TableSection(dim=2, optimizer=Adam(kind="adam")), "'optimizer': 'adam'"),
        (TableSection(dim=2, optimizer=Adagrad(per="element")), "adagrad by element"),
        (TableSection(dim=2, first_order=False), "'first_order': False"),
    ],
)
def test_rows_of_another_layout_are_refused(save, section, message):
    with pytest.raises(BadSave, match=message):
        load(save, section)


def test_another_set_of_tables_is_refused(save):
    with pytest.raises(BadSave, match="was saved from tables"):
        check_header(save, {"t": SECTIONS["t"], "more": SECTIONS["t"]})


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("save.json", lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 2')), "format 2"),
        ("save.json", lambda path: path.write_text("{"), "not JSON"),
        ("save.json", lambda path: path.unlink(), "no whole save"),
        ("part-0/t/keys.npy", lambda path: path.unlink(), "cannot be read"),
        ("part-0/t/keys.npy", lambda path: path.write_bytes(b"hello"), "cannot be read"),
        ("part-0/t/keys.npy", lambda path: np.save(path, np.arange(3, dtype=np.uint64)), r"holds \(3,\), not \(10,\)"),
        ("part-0/t/slab.npy", lambda path: np.save(path, np.ones((10, 5), np.float32)), "do not have the digest"),
        ("part-0/t/show.npy", lambda path: np.save(path, np.ones(10, np.float64)), "float64, not float32"),
        ("part-0/t/rows.json", lambda path: path.write_text("{}"), "cannot be read"),
    ],
)
def test_a_damaged_save_is_refused_with_the_place(save, file, change, message):
    change(save / file)
    with pytest.raises(BadSave, match=message):
        load(save)
