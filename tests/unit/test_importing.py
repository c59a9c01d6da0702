"""Warm starts: sources, selection, refusals; and a failed import leaves nothing behind."""

import gzip
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.deadline import Deadline
from headrace.errors import BadInput, SpecError
from headrace.keys import key_of_reference
from headrace.pserver.config import TableSection
from headrace.pserver.lifecycle.aging import RowStatistics
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.pserver.rows.row_format import HEAD
from headrace.service.cluster.store import IDENTITY, LOCK, MARKER, claimed, identity_folder
from headrace.service.exports import model_import
from headrace.service.exports.model_import import ImportRequest, import_into
from headrace.service.history.model_state import CommitState
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits, problems_of, read_commit
from headrace.trainer.exports.destination import ExportTooNew, ParentMissing
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection
from headrace.trainer.importing import first_commit, paddle_source
from headrace.trainer.importing.selection import choose_tensors, parse_slots
from tests.fakes.exports import GROUPS, write_export
from tests.integration.stream_job import write_job

SHAPES = {"mlp.0.weight": (8, 14), "mlp.0.bias": (8,), "out.weight": (1, 8)}
ROWS = {("a", 1): [0.5, 1, 2, 3, 4], ("a", 2): [0, -1, -2, -3, -4], ("b", 1): [1, 0, 0, 0, 0]}


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """The small job, with settings; its model is not built."""
    monkeypatch.setattr(model_import, "shapes_of", lambda job, folder: SHAPES)
    path = write_job(tmp_path, num_parts=1, num_lines=1)
    return lambda *settings: load_job(path, settings)


@pytest.fixture
def taken(job_of, tmp_path):
    """The result of an import: (slot, sign) -> values; settings of the job may be given."""

    def run(source, *settings, **asked):
        job = job_of(*settings)
        import_into(job, ImportRequest(str(source), **asked))
        return rows_of(job, tmp_path)

    return run


def commit_of(job):
    (name,) = Commits(job.store).names()
    return Commits(job.store).read(name)


def rows_of(job, tmp_path, table="default"):
    found = {}
    with CommitState(commit_of(job), tmp_path / "look").rows(table) as chunks:
        for chunk in chunks:
            for slot, sign, values in zip(chunk.names(), chunk.sign_R.tolist(), chunk.values.tolist(), strict=True):
                found[slot, sign] = values
    return found


def words_of(job, tmp_path, table="default"):
    section = job.spec.tables[table]
    with CommitTableRows(commit_of(job), table, section, GROUPS, tmp_path / "words") as source:
        (chunk,) = source.all(RowSelection(ExportCut(since=0), 1, is_base=True), Deadline.after(30))
        return dict(zip(chunk.keys_U.tolist(), chunk.words_UW, strict=True))


def nothing_is_left(job):
    return not job.store.exists()


def vector(*numbers):
    return [float(np.float32(number)) for number in numbers]


# Exports


def test_an_export_with_its_chain_becomes_the_first_commit(tmp_path, job_of, capsys):
    out = tmp_path / "exports"
    write_export(out, "base", 3, ROWS, dense={"mlp.0.bias": np.ones(8)})
    last = write_export(
        out, "delta", 5, {("b", 7): [1] * 5}, [("a", 2)], parent=(3, "base"),
        dense={"mlp.0.weight": np.full((8, 14), 2.0), "mlp.0.bias": np.ones(9), "gone": np.ones(1)},
    )  # fmt: skip
    job = job_of()
    import_into(job, ImportRequest(str(last)))
    commit = commit_of(job)
    assert (commit.name, commit.version, commit.state["imported"]["name"]) == (
        "t0-0000000001-g0",
        1,
        "0000000005-delta",
    )
    assert problems_of(commit) == {}
    assert rows_of(job, tmp_path) == {("a", 1): ROWS["a", 1], ("b", 1): ROWS["b", 1], ("b", 7): [1] * 5}
    dense = CommitState(commit, tmp_path).dense()
    assert {name: tensor.tolist() for name, tensor in dense.items()} == {"mlp.0.weight": np.full((8, 14), 2.0).tolist()}
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "table default: 3 rows loaded",
        "  slot a: 1 rows",
        "  slot b: 2 rows",
        "  no rows of: history",
        "dense: loaded mlp.0.weight",
        "dense: initialised mlp.0.bias: of shape [9] there, [8] here",
        "dense: initialised out.weight: the source lacks it",
        "dense: ignored gone: the model has none of this name",
        f"{job.store} begins with commit t0-0000000001-g0; `headrace run` continues from it",
    ]


def test_rows_get_a_fresh_state_and_a_version_that_no_pass_has(tmp_path, job_of):
    job = job_of("tables.default.optimizer.kind='adagrad'", "tables.default.optimizer.initial=0.25")
    import_into(job, ImportRequest(str(write_export(tmp_path / "out", "base", 3, ROWS))))
    words = words_of(job, tmp_path)[key_of_reference(1, GROUPS["a"])]
    assert words[:HEAD].tolist() == [GROUPS["a"], first_commit.VERSION, 0, 0, 0]
    assert words[HEAD:].view(np.float32).tolist() == [*ROWS["a", 1], 0.25, 0.25]


def test_ftrl_keeps_the_weights_it_is_given(tmp_path, job_of):
    settings = ["tables.default.optimizer={kind='ftrl',l1=0.5,l2=0.1,beta=1.0,lr=0.05}"]
    job = job_of(*settings)
    import_into(job, ImportRequest(str(write_export(tmp_path / "out", "base", 3, ROWS))))
    for (slot, sign), values in ROWS.items():
        floats = words_of(job, tmp_path)[key_of_reference(sign, GROUPS[slot])][HEAD:].view(np.float32)
        w, z, n = floats[:5], floats[5:10], floats[10:]
        assert w.tolist() == values and not n.any()
        stood_for = -(z - np.sign(z) * 0.5) / (1.0 / 0.05 + 0.1) * (np.abs(z) > 0.5)
        np.testing.assert_allclose(stood_for, w, rtol=1e-5, atol=1e-6)


def test_rows_that_wait_for_their_vector_come_without_one(tmp_path, job_of):
    job = job_of("tables.default.slots={b={extend_at=5.0}}", "tables.default.optimizer={kind='adagrad',initial=0.25}")
    zeros = {("a", 9): [1.0, 0, 0, 0, 0], ("b", 9): [1, 2, 3, 4, 5]}
    import_into(job, ImportRequest(str(write_export(tmp_path / "out", "base", 3, ROWS | zeros))))
    words = words_of(job, tmp_path)

    def floats(slot, sign):
        return words[key_of_reference(sign, GROUPS[slot])][HEAD:].view(np.float32).tolist()

    assert floats("b", 1) == [1, 0, 0, 0, 0, 0.25, 0, 0], "no vector, nor what its optimizer would keep"
    assert floats("b", 9) == [1, 2, 3, 4, 5, 0.25, 0.25, 1]
    assert floats("a", 9) == [1, 0, 0, 0, 0, 0.25, 0.25, 1], "where rows are born with a vector, zeros are one"


def test_slots_and_tables_choose_rows(tmp_path, taken, capsys):
    out = write_export(tmp_path / "out", "base", 3, ROWS | {("history", 4): [1] * 5})
    assert taken(out, slots="a, history=b") == {
        ("a", 1): ROWS["a", 1], ("a", 2): ROWS["a", 2], ("history", 1): ROWS["b", 1]
    }  # fmt: skip
    assert "ignored: 1 rows of slot history: not among --slots" in capsys.readouterr().out


def test_slots_that_the_job_lacks_are_ignored_and_listed(tmp_path, taken, capsys):
    out = write_export(tmp_path / "out", "base", 3, ROWS | {("z", 4): [1] * 5}, groups=GROUPS | {"z": 3})
    assert taken(out).keys() == ROWS.keys()
    assert "ignored: 1 rows of slot z: the job has no sparse slot 'z'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "settings", "error", "words"),
    [
        ({"slots": "aa"}, [], SpecError, r"no sparse slot 'aa'; did you mean 'a'\?"),
        ({"slots": "a=bb"}, [], BadInput, r"no rows of slot 'bb', for 'a'; did you mean 'b'\?"),
        ({"slots": "a,a"}, [], SpecError, "'a' is named twice"),
        ({"tables": ("defualt",)}, [], SpecError, r"no table 'defualt'; did you mean 'default'\?"),
        ({"dense": "nlp.*"}, [], SpecError, r"'nlp\.\*' matches no tensor of the source"),
        ({}, ["tables.default.dim=8"], BadInput, "has dim 4; table 'default' of the job has 8"),
    ],
)
def test_a_misfit_is_refused_and_nothing_is_left(tmp_path, job_of, asked, settings, error, words):
    out = write_export(tmp_path / "out", "base", 3, ROWS, dense={"mlp.0.bias": np.ones(8)})
    job = job_of(*settings)
    with pytest.raises(error, match=words):
        import_into(job, ImportRequest(str(out), **asked))
    assert nothing_is_left(job)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("place", "what"), [(0, "weight"), (3, "vector")])
def test_values_that_are_not_finite_are_named(tmp_path, job_of, bad, place, what):
    values = [1.0] * 5
    values[place] = bad
    out = write_export(tmp_path / "out", "base", 3, ROWS | {("b", 77): values})
    job = job_of()
    with pytest.raises(BadInput, match=rf"slot 'b', sign 77: its {what} is not a finite number"):
        import_into(job, ImportRequest(str(out)))
    assert nothing_is_left(job)


def test_an_export_of_a_newer_format_or_without_its_parent_is_refused(tmp_path, job_of):
    newer = write_export(tmp_path / "newer", "base", 3, ROWS, format=2)
    with pytest.raises(ExportTooNew, match=r"format 2; .* reads format 1"):
        import_into(job_of(), ImportRequest(str(newer)))
    orphan = write_export(tmp_path / "orphan", "delta", 3, ROWS, parent=(2, "base"))
    with pytest.raises(ParentMissing, match="0000000002-base"):
        import_into(job_of(), ImportRequest(str(orphan)))
    assert nothing_is_left(job_of())


def test_a_damaged_file_is_found_before_anything_is_made(tmp_path, job_of):
    out = write_export(tmp_path / "out", "base", 3, ROWS)
    (out / "model.json").write_text("[]")
    with pytest.raises(BadInput, match=r"model\.json"):
        import_into(job_of(), ImportRequest(str(out)))


def test_two_slots_that_share_rows_here_collide(tmp_path, job_of):
    path = tmp_path / "job.toml"
    path.write_text(path.read_text() if path.exists() else "")
    job_of()
    path.write_text(path.read_text().replace('names = ["a", "b"]', 'names = ["a", "b"]\nshare = "both"'))
    out = write_export(tmp_path / "out", "base", 3, ROWS)
    job = load_job(path)
    with pytest.raises(BadInput, match=r"duplicate row: .*slot 'b'.* and .*slot 'a'"):
        import_into(job, ImportRequest(str(out)))


def test_a_store_that_holds_a_run_is_refused(tmp_path, job_of):
    out = write_export(tmp_path / "out", "base", 3, ROWS)
    import_into(job_of(), ImportRequest(str(out)))
    with pytest.raises(SpecError, match="an import needs an empty store"):
        import_into(job_of(), ImportRequest(str(out)))
    with pytest.raises(SpecError, match="an import needs an empty store"):
        import_into(job_of(), ImportRequest(str(out), dry_run=True))


def test_a_refused_import_leaves_nothing_and_may_be_tried_again(tmp_path, job_of):
    out, job = write_export(tmp_path / "out", "base", 3, ROWS), job_of()
    for _ in range(2):
        with pytest.raises(BadInput, match="the source has no rows of slot 'c', for 'b'"):
            import_into(job, ImportRequest(str(out), slots="a,b=c"))
        assert nothing_is_left(job)
    token = identity_folder(job.store) / "token"
    token.parent.mkdir()
    token.touch()
    with pytest.raises(BadInput):
        import_into(job, ImportRequest(str(out), slots="a,b=c"))
    assert sorted(path.name for path in job.store.iterdir()) == sorted([IDENTITY, LOCK, MARKER]), "what was there stays"
    import_into(job, ImportRequest(str(out)))
    assert len(rows_of(job, tmp_path)) == len(ROWS) and token.exists()


def test_a_run_is_removed_for_an_import_that_succeeds_only(tmp_path, job_of, capsys):
    out, job = write_export(tmp_path / "out", "base", 3, ROWS), job_of()
    import_into(job, ImportRequest(str(out), fresh=True))
    before = rows_of(job, tmp_path)
    other = write_export(tmp_path / "other", "base", 3, {("a", 9): [5] * 5})
    for asked in ({"slots": "b=c"}, {"dry_run": True}):
        with suppress(BadInput):
            import_into(job, ImportRequest(str(other), fresh=True, **asked))
        assert rows_of(job, tmp_path) == before
    capsys.readouterr()
    import_into(job, ImportRequest(str(other), fresh=True))
    assert rows_of(job, tmp_path) == {("a", 9): [5] * 5}
    assert "table default: 1 rows loaded" in capsys.readouterr().out, "counted once, though read twice"


def test_a_dry_run_reports_everything_and_writes_nothing(tmp_path, job_of, capsys):
    out = write_export(tmp_path / "out", "base", 3, ROWS)
    job = job_of()
    import_into(job, ImportRequest(str(out), dry_run=True))
    assert "table default: 3 rows loaded" in capsys.readouterr().out
    assert not job.store.exists()


def test_leftovers_of_a_killed_import_do_no_harm(tmp_path, job_of):
    job = job_of()
    with claimed(job.store, "small", fresh=False):
        (job.store / "commits" / "t0-0000000001-g0.importing" / "shard-0").mkdir(parents=True)
        (job.store / "live" / "import" / "default").mkdir(parents=True)
    import_into(job, ImportRequest(str(write_export(tmp_path / "out", "base", 3, ROWS))))
    assert [path.name for path in Commits(job.store).folder.iterdir()] == ["t0-0000000001-g0"]
    assert not (job.store / "live" / "import").exists()


# Paddle's text


def save(folder, **parts):
    folder.mkdir()
    for name, lines in parts.items():
        (folder / name.replace("_", "-")).write_text("".join(f"{line}\n" for line in lines))
    return folder


FULL = "11 101 3 0.5 2.5 1.25 0.75 0.1 1 2 3 4 0.2"
SHORT = "12 102 0 0 1 0 -0.5 0.1"


def test_a_save_of_paddle_is_read(tmp_path, job_of):
    source = save(tmp_path / "000", part_000_00000=[FULL], part_000_00001=[SHORT])
    (source / "meta").write_text("not read")
    job = job_of()
    import_into(job, ImportRequest(str(source), slots="a=101,b=102"))
    found = rows_of(job, tmp_path)
    assert found["a", 11] == [0.75, 1, 2, 3, 4]
    weight, *rest = found["b", 12]
    assert weight == -0.5 and 0 < max(map(abs, rest)) <= 0.01, "a row without a vector begins with an initial one"
    words = words_of(job, tmp_path)[key_of_reference(11, GROUPS["a"])]
    assert words[:2].tolist() == [GROUPS["a"], first_commit.VERSION]
    assert words[2:HEAD].view(np.float32).tolist() == [2.5, 1.25, 0.5]


def test_numbers_name_slots_and_gzip_is_read(tmp_path, job_of, monkeypatch):
    source = tmp_path / "000"
    source.mkdir()
    with gzip.open(source / "part-000-00000.gz", "wt") as text:
        text.write(f"{FULL}\n{SHORT}\n")
    monkeypatch.setattr(paddle_source, "BATCH_LINES", 1)
    job = job_of()
    import_into(job, ImportRequest(str(source / "part-000-00000.gz"), slots="a=101"))
    assert rows_of(job, tmp_path).keys() == {("a", 11)}


def test_a_g2sum_for_each_number_is_read_too(tmp_path, taken):
    source = save(tmp_path / "000", part_000_00000=["11 101 3 0.5 2.5 1 0.75 0.1 1 2 3 4 9 9 9 9"])
    assert taken(source, slots="a=101") == {("a", 11): [0.75, 1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("11 101 3 0.5", r"has 4 words; .* dim 4, .* has 8, 13, 16"),
        (
            "11 101 0 0 1 0 1 0.1 1 2 3 4 5 6 7 8 9",
            r"line 2: has 17 words; .* of dim 10 \(naive\) or 8 \(adagrad\)",
        ),
        (
            "11 101 0 0 1 0 1 1 2 3 4",
            r"has 11 words.*; this is a line of the rule naive: .*kind = \"sgd\", or of",
        ),
        ("x 101 0 0 1 0 1 0.1", r"line 2: 'x' is not a key"),
        ("-1 101 0 0 1 0 1 0.1", r"'-1' is not a key"),
        ("18446744073709551616 101 0 0 1 0 1 0.1", "is not a key: a whole number below"),
        ("11 10.5 0 0 1 0 1 0.1", r"10\.5 is not a slot number"),
        ("11 101 0 0 1 0 oops 0.1", r"part-000-00000, line 2: could not convert"),
        ("12 102 0 0 1 0 nan 0.1", r"line 2: slot '102', sign 12: its weight is not a finite number"),
        (FULL, r"duplicate row: part-000-00000, line 1 .* and part-000-00000, line 2"),
    ],
)
def test_lines_of_another_layout_are_named(tmp_path, job_of, line, words):
    source = save(tmp_path / "000", part_000_00000=[FULL, line])
    job = job_of()
    with pytest.raises(BadInput, match=words):
        import_into(job, ImportRequest(str(source), slots="a=101,b=102"))
    assert nothing_is_left(job)


GOES_ON = {
    # kind: (line with a vector, line without one, state of the first row, of the second: the vector's part is fresh)
    "kind='paddle_adagrad'": (FULL, SHORT, [0.1, 0.2], [0.1, 0.0]),
    "kind='paddle_adagrad',per='element'": (
        "11 101 3 0.5 2.5 1.25 0.75 0.1 1 2 3 4 5 6 7 8", SHORT, [0.1, 5, 6, 7, 8], [0.1, 0, 0, 0, 0]
    ),
    "kind='paddle_adam',beta1=0.5,beta2=0.75": (
        "11 101 3 0.5 2.5 1.25 0.75 -1 2 0.25 0.5 1 2 3 4 -5 -6 -7 -8 15 16 17 18 0.125 0.0625",
        "12 102 0 0 1 0 -0.5 -1 2 0.25 0.5",
        [-1, -5, -6, -7, -8, 2, 15, 16, 17, 18, 0.25, 0.5, 0.125, 0.0625],
        [-1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0.25, 0.5, 0.5, 0.75],
    ),
    "kind='sgd'": ("11 101 3 0.5 2.5 1.25 0.75 1 2 3 4", "12 102 0 0 1 0 -0.5", [], []),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOES_ON)
def test_rows_of_paddle_go_on_with_the_state_of_their_optimizer(tmp_path, job_of, capsys, kind):
    whole, bare, *states = GOES_ON[kind]
    source = save(tmp_path / "000", part_000_00000=[whole, bare])
    job = job_of(f"tables.default.optimizer={{{kind}}}")
    import_into(job, ImportRequest(str(source), slots="a=101,b=102"))
    words, found = words_of(job, tmp_path), rows_of(job, tmp_path)
    assert found["a", 11] == [0.75, 1, 2, 3, 4] and found["b", 12][0] == -0.5
    for (slot, sign), state in zip((("a", 11), ("b", 12)), states, strict=True):
        row = words[key_of_reference(sign, GROUPS[slot])][HEAD:].view(np.float32).tolist()
        assert row[5:] == vector(*state), slot
    assert "begins anew" not in capsys.readouterr().out


def test_without_a_first_order_weight_its_state_is_left_out(tmp_path, job_of):
    adam = GOES_ON["kind='paddle_adam',beta1=0.5,beta2=0.75"]
    job = job_of("tables.default={dim=4,first_order=false,optimizer={kind='paddle_adam'}}", "model.name=dcn_v2")
    import_into(job, ImportRequest(str(save(tmp_path / "000", part_000_00000=adam[:1])), slots="a=101"))
    row = words_of(job, tmp_path)[key_of_reference(11, GROUPS["a"])][HEAD:].view(np.float32).tolist()
    assert row == [1, 2, 3, 4, -5, -6, -7, -8, 15, 16, 17, 18, 0.25, 0.5, 0.125, 0.0625]


def test_another_optimizer_says_that_its_state_begins_anew(tmp_path, job_of, capsys):
    import_into(job_of(), ImportRequest(str(save(tmp_path / "000", part_000_00000=[FULL])), slots="a=101"))
    assert "optimizer: its state begins anew" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        ("kind='paddle_adagrad'", "11 101 0 0 1 0 1 -0.1", "line 1: -0.1 is a sum of squares .* below 0"),
        ("kind='paddle_adagrad'", "11 101 0 0 1 0 1 nan", "its state is not a finite number"),
        ("kind='paddle_adam'", "11 101 0 0 1 0 1 1 1 1.0 0.5", r"line 1: \[1.0, 0.5\] are powers of betas"),
        ("kind='paddle_adam'", "11 101 0 0 1 0 1 1 -1 0.9 0.5", "line 1: -1 is a sum of squares"),
        ("kind='paddle_adam'", FULL, r"the rule adam has 11, 25; this is a line of the rule adagrad: .*paddle_adagrad"),
    ],
)
def test_a_state_that_no_rule_has_is_named(tmp_path, job_of, kind, line, words):
    source = save(tmp_path / "000", part_000_00000=[line])
    job = job_of(f"tables.default.optimizer={{{kind}}}")
    with pytest.raises(BadInput, match=words):
        import_into(job, ImportRequest(str(source), slots="a=101"))
    assert nothing_is_left(job)


def test_a_line_that_may_be_of_two_rules_is_refused(tmp_path, job_of):
    job = job_of("tables.default={dim=1,optimizer={kind='sgd'}}")
    source = save(tmp_path / "000", part_000_00000=["11 101 0 0 1 0 1 0.1"])
    with pytest.raises(BadInput, match="is adagrad without a vector or naive with a vector or std_adagrad without"):
        import_into(job, ImportRequest(str(source), slots="a=101"))


def test_tables_of_several_optimizers_need_one_named(tmp_path, job_of):
    other = ("tables.other={dim=4,optimizer={kind='sgd'}}", "slots.2={name='history',pooling='mean',table='other'}")
    source = save(tmp_path / "000", part_000_00000=[FULL])
    with pytest.raises(SpecError, match="because the optimizers differ: default adagrad, other sgd"):
        import_into(job_of(*other), ImportRequest(str(source), slots="a=101"))


def test_a_duplicate_key_is_named_with_both_places(tmp_path, job_of, monkeypatch):
    monkeypatch.setattr(paddle_source, "BATCH_LINES", 1)
    source = save(tmp_path / "000", part_000_00000=[FULL, SHORT], part_001_00000=[FULL])
    with pytest.raises(BadInput, match=r"part-000-00000, line 1 \(slot '101'\) and part-001-00000, line 1"):
        import_into(job_of(), ImportRequest(str(source), slots="a=101,b=102"))


def test_a_save_without_a_slot_of_the_job_is_refused(tmp_path, job_of):
    source = save(tmp_path / "000", part_000_00000=[FULL, SHORT])
    with pytest.raises(BadInput, match="it has the slots 101, 102; map them with --slots"):
        import_into(job_of(), ImportRequest(str(source)))


def test_a_save_for_tables_of_several_dims_needs_one_named(tmp_path, job_of):
    source = save(tmp_path / "000", part_000_00000=[FULL])
    other = ("tables.other.dim=2", "slots.2={name='history',pooling='mean',table='other'}")
    job = job_of(*other, "model.name=dcn_v2")  # a model that takes vectors of several lengths
    with pytest.raises(SpecError, match="name it, because the dims differ: default 4, other 2"):
        import_into(job, ImportRequest(str(source), slots="a=101"))
    import_into(job, ImportRequest(str(source), slots="a=101", tables=("default",)))


# Parquet


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


VECTORS = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]


def test_columns_of_signs_and_vectors_are_read(tmp_path, taken):
    path = parquet(tmp_path / "x.parquet", slot=["a", "b"], sign=pa.array([1, 2], pa.uint64()), vector=VECTORS)
    assert taken(path) == {("a", 1): [0, *VECTORS[0]], ("b", 2): [0, *VECTORS[1]]}


def test_keys_are_this_jobs_and_weights_are_taken(tmp_path, taken):
    keys = pa.array([key_of_reference(1, GROUPS["a"]), key_of_reference(2, GROUPS["b"])], pa.uint64())
    vectors = pa.array(VECTORS, pa.list_(pa.float16(), 4))
    path = parquet(tmp_path / "x.parquet", slot=["a", "b"], key=keys, vector=vectors, weight=[0.5, -0.5])
    assert taken(path) == {("a", 1): [0.5, *VECTORS[0]], ("b", 2): [-0.5, *VECTORS[1]]}


def test_shows_and_clicks_come_with_their_rows(tmp_path, job_of):
    path = parquet(tmp_path / "x.parquet", slot=["a", "b"], sign=[1, 2], vector=VECTORS, show=[8, 3], click=[2.5, 0])
    import_into(job := job_of(), ImportRequest(str(path)))
    words = words_of(job, tmp_path)
    found = RowStatistics.of_words(np.stack([words[key_of_reference(n, GROUPS[s])] for s, n in (("a", 1), ("b", 2))]))
    assert (found.show.tolist(), found.click.tolist(), found.last_seen_day.tolist()) == ([8, 3], [2.5, 0], [0, 0])


def test_one_slot_named_needs_no_column(tmp_path, taken):
    path = parquet(tmp_path / "x.parquet", sign=[3, 4], vector=VECTORS)
    assert taken(path, slots="b").keys() == {("b", 3), ("b", 4)}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"sign": [1, 2], "vector": VECTORS}, "has no column 'slot'"),
        ({"slot": ["a", "b"], "vector": VECTORS}, "must have either a column 'sign' or"),
        ({"slot": ["a", "b"], "sign": [1, 2], "key": [1, 2], "vector": VECTORS}, "a column 'sign' or"),
        ({"slot": ["a", "b"], "sign": [1, 2]}, "neither a column 'vector' nor 'weight'"),
        ({"slot": ["a", "b"], "sign": [1, -2], "vector": VECTORS}, "-2 is negative"),
        ({"slot": ["a", None], "sign": [1, 2], "vector": VECTORS}, "row 1: slot is null"),
        ({"slot": ["a", "b"], "sign": [1.5, 2], "vector": VECTORS}, "sign: is double, must be uint64"),
        ({"slot": ["a", "b"], "sign": [1, 2], "vector": [[1.0], [1.0, 2.0]]}, "row 1: its vector has 2 numbers"),
        ({"slot": ["a", "b"], "sign": [1, 2], "vector": ["x", "y"]}, "vector is string"),
        ({"slot": ["a", "b"], "sign": [1, 2], "vector": [[1.0], [2.0]]}, "row 0: has dim 1; .* has 4"),
        ({"slot": ["a", "b"], "sign": [1, 2], "vector": [VECTORS[0], [1e300] * 4]}, "sign 2: its vector is not"),
        ({"slot": ["a", "a"], "sign": [1, 1], "vector": VECTORS}, "row 0 .* and x.parquet, row 1"),
        ({"slot": ["a", "b"], "sign": [1, 2], "vector": VECTORS, "show": ["1", "2"]}, "show: is string, must be a n"),
        ({"slot": ["a", "b"], "sign": [1, 2], "vector": VECTORS, "show": [1.0, float("nan")]}, "its show is not a f"),
        ({"slot": ["a", "b"], "sign": [1, 2], "vector": VECTORS, "click": [1, -1]}, "row 1: its click is below 0"),
    ],
)
def test_columns_that_do_not_fit_are_named(tmp_path, job_of, columns, words):
    job = job_of()
    with pytest.raises(BadInput, match=words):
        import_into(job, ImportRequest(str(parquet(tmp_path / "x.parquet", **columns))))
    assert nothing_is_left(job)


def test_an_address_without_a_source_is_refused(tmp_path, job_of):
    (tmp_path / "empty").mkdir()
    for where, words in ((tmp_path / "empty", "it has none of these"), (tmp_path / "nowhere", "nothing exists there")):
        with pytest.raises(BadInput, match=words):
            import_into(job_of(), ImportRequest(str(where)))


# Selection


def test_names_of_slots_may_differ():
    assert parse_slots("a, b=102 ,") == {"a": "a", "b": "102"}


def test_tensors_are_chosen_by_name_and_shape():
    theirs = {"mlp.0.weight": (2, 3), "mlp.0.bias": (2,), "out": (1,)}
    found = choose_tensors("mlp.*", theirs, {"mlp.0.weight": (2, 3), "mlp.0.bias": (4,), "out": (1,), "new": (5,)})
    assert found.loaded == ("mlp.0.weight",)
    assert found.initialised == {
        "mlp.0.bias": "of shape [2] there, [4] here", "out": "not among --dense", "new": "the source lacks it"
    }  # fmt: skip
    assert found.ignored == ()


def test_the_maker_takes_rows_of_a_table_without_weights():
    maker = first_commit.RowMaker("t", TableSection(dim=2, first_order=False), {}, 1)
    assert maker.num_words == HEAD + 2 + 2


def test_an_imported_commit_is_read_like_any(tmp_path, job_of):
    job = job_of()
    import_into(job, ImportRequest(str(write_export(tmp_path / "out", "base", 3, ROWS))))
    commit = read_commit(commit_of(job).folder)
    (part,) = commit.shards
    assert part.buckets == (0, 4096)
    assert part.tables["default"] == TableFacts(3, {0: 2, 1: 1})
    assert commit.num_rows == 3 and commit.log_from == 1
