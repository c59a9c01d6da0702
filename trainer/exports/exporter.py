"""Makes one export of one commit: files, gates, manifest, _DONE, then the steps after a complete export.

Nothing reads an export without _DONE, so _DONE is written last. After an earlier failure the files are removed. An
export that is requested again after its _DONE is not made again: only missing later steps are done. Imports no torch.
"""

import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import documents, process
from headrace.blob.blob_errors import BlobUnavailable
from headrace.blob.blob_writer import BlobWriter
from headrace.deadline import Deadline
from headrace.done_markers import DONE
from headrace.durable import writing
from headrace.errors import DeadlineExceeded, HeadraceError, SpecError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.errors import StoreDamaged
from headrace.pserver.protocol.shards import U64
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.trainer.checkpoint.commits import Commit, CommitDamaged, read_commit
from headrace.trainer.checkpoint.object_store import complete_commit
from headrace.trainer.exports import gates, manifest, pointers
from headrace.trainer.exports.destination import ExportDestination, open_destination
from headrace.trainer.exports.export_messages import ExportAnswer, ExportRequest
from headrace.trainer.exports.manifest import ExportHead, ManifestUnusable
from headrace.trainer.exports.model_files import TEMPLATE, ServedRows, dense_file, dense_of, write_model
from headrace.trainer.exports.parquet_files import ExportTableWriter, SlotNames, TableCounts
from headrace.trainer.exports.pointers import HeadIsReplaced
from headrace.trainer.exports.reader import DENSE, MANIFEST, MODEL
from headrace.trainer.exports.row_selection import CommitTableRows, DeltaImpossible, RowSelection
from headrace.trainer.exports.row_values import as_exported
from headrace.trainer.exports.scores import Score, Scores
from headrace.trainer.exports.slot_files import write_slot_files
from headrace.trainer.journal.fence import timeline_number

FINAL = (DeltaImpossible, ManifestUnusable, CommitDamaged, StoreDamaged, SpecError, HeadIsReplaced)
"""Failures that would repeat at every try."""

MAX_SHOWN = 2000
"""The message of a failed command repeats so many of the last characters of its output."""

log = logging.getLogger(__name__)


class AddressTaken(DeltaImpossible):
    """Another export has the same address."""


@dataclass
class ExportFiles:
    """The files of the export in progress."""

    outlet: ExportDestination
    path: str
    """"t1/0000000012-base"."""
    written: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The manifest's entries of complete files."""

    @contextmanager
    def open(self, name: str) -> Iterator[BlobWriter]:
        """A new file; it belongs to the export once the context ends."""
        with self.outlet.file(f"{self.path}/{name}") as sink:
            yield sink
        rows = {} if sink.rows is None else {"rows": sink.rows}
        self.written[name] = {"sha256": sink.sha256, "bytes": sink.num_bytes, **rows}


def export(request: ExportRequest, scratch: Path, generation: int | None = None) -> ExportAnswer:
    """Make an export within its deadline; a failure becomes an answer. `scratch`: a folder for this call alone.

    `generation`: of rank 0, which must not be replaced; None: not checked.
    """
    started_s, deadline = time.monotonic(), Deadline.after(request.section.try_s)
    try:
        with _scratch(scratch):
            outlet = open_destination(request.address, request.job, scratch / "out", deadline)
            head = None if generation is None else ExportHead(timeline_number(request.timeline), generation)
            if request.point:
                return point_back(request, outlet, head)
            answer = ExportRun(request, outlet, scratch, deadline, head).run()
    except HeadraceError as error:
        log.warning("export %s of %s failed: %s", request.name, request.stream, error)
        return ExportAnswer(
            name=request.name,
            outcome="failed",
            error=_worded(error, request),
            final=isinstance(error, FINAL),
            seconds=time.monotonic() - started_s,
        )
    return answer.model_copy(update={"seconds": time.monotonic() - started_s})


def _worded(error: HeadraceError, request: ExportRequest) -> str:
    if isinstance(error, DeadlineExceeded) or (isinstance(error, BlobUnavailable) and error.out_of_time):
        at, section = f"exports.{request.stream}", request.section
        if section.gates.evaluator is None:
            return f"{error}: {at}.deadline is {section.deadline:g} s"
        return f"{error}: {at}.deadline and {at}.gates.evaluator.wait are {section.try_s:g} s together"
    return str(error)


def point_back(request: ExportRequest, outlet: ExportDestination, head: ExportHead | None) -> ExportAnswer:
    """Have current.json name the first of the older exports of a rollback that exists.

    Nothing changes where this rollback was done before, or a later export is current: a rerun or a person came after.
    """
    current = pointers.read_current(outlet)
    if current is not None and current.get("timeline") == request.timeline:
        version = current.get("version")
        is_later = isinstance(version, int) and version > request.version
        if is_later or manifest.rolled_back(current, request.timeline) >= request.version:
            return ExportAnswer(name=request.name, outcome="complete", path=str(current["path"]), current=True)
    for path in request.point:
        if (content := pointers.read_manifest(outlet, path)) is not None:
            mark = {"timeline": request.timeline, "version": request.version}
            pointers.write_current(outlet, content, pointers.chain_of(outlet, content, ()), head, mark)
            return ExportAnswer(name=request.name, outcome="complete", path=path, current=True)
    raise ManifestUnusable(
        f"none of the exports before the fall exists in {outlet.url('')} any more: set exports.{request.stream}.keep "
        "higher, or choose one with `headrace exports point`"
    )


@contextmanager
def _scratch(path: Path) -> Iterator[None]:
    shutil.rmtree(path, ignore_errors=True)
    with writing(path):
        path.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass
class ExportRun:
    """One export in progress."""

    request: ExportRequest
    outlet: ExportDestination
    scratch: Path
    deadline: Deadline
    head: ExportHead | None = None
    """The head that asks; None: not checked."""
    _parent: Mapping[str, Any] | None = None
    """The manifest of a delta's parent."""

    @property
    def path(self) -> str:
        """Path below the job's exports."""
        return f"{self.request.timeline}/{self.request.name}"

    def run(self) -> ExportAnswer:
        """1. Make the export, unless it is complete. 2. Do the steps after it."""
        content = pointers.read_manifest(self.outlet, self.path)
        if content is None:
            content = self._make()  # 1
        elif (differs := self._difference(content)) is not None:
            raise AddressTaken(
                f"{self.outlet.url(self.path)} holds another complete export: {differs}; give the stream a path of "
                "its own, or move the other export away"
            )
        return self._follow(content)  # 2

    def _difference(self, content: Mapping[str, Any]) -> str | None:
        """How the existing export differs from the requested one. It may come from another run of the job."""
        ours = hashlib.sha256(dense_file(dense_of(self.request.commit))).hexdigest()
        if (differs := manifest.difference(content, self.request)) is None and content["files"][DENSE][
            "sha256"
        ] != ours:
            differs = f"its {DENSE} has other tensors"
        return differs

    def _make(self) -> dict[str, Any]:
        """1. Check head and parent. 2. Remove leftovers. 3. Rows. 4. Model. 5. Gates and manifest. 6. _DONE."""
        pointers.check_head(self.outlet, self.head)
        current_rows = self._current_rows()
        self._check_parent()  # 1
        commit = read_commit(self.request.commit)
        complete_commit(commit, self.deadline)
        files = ExportFiles(self.outlet, self.path)
        try:
            pointers.remove_export(self.outlet, self.path)  # 2
            failpoint(Failpoint.EXPORT_BEGUN)
            with ExitStack() as open_stores:
                sources = self._sources(commit, open_stores)
                counts, tables = self._tables(sources, files)  # 3
                slots = self._slot_files(commit, sources, open_stores, files)
                served = self._served(sources)
                model = write_model(commit.folder, self.request.stage, files.open, served)  # 4
                items = self._items(commit, served, files)
            more = {**model.message(), **slots, **items}
            content = self._manifest(counts, tables, more, model.gate, files, current_rows)
            self.outlet.put(f"{self.path}/{MANIFEST}", manifest.as_bytes(content))  # 5
            failpoint(Failpoint.EXPORT_MANIFEST)
            self.deadline.check("completing the export")
            pointers.check_head(self.outlet, self.head)
            self.outlet.put(f"{self.path}/{DONE}", b"")  # 6
        except HeadraceError:
            with suppress(HeadraceError):  # the next try removes it; the first error matters more
                pointers.check_head(self.outlet, self.head)  # or else it is another's by now
                pointers.remove_export(self.outlet, self.path)
            raise
        failpoint(Failpoint.EXPORT_DONE)
        return content

    def _check_parent(self) -> None:
        parent = self.request.parent
        if self.request.kind == "base":
            return
        if parent is None:
            raise DeltaImpossible("a delta without a parent: a base is needed")
        path = f"{parent.timeline}/{parent.name}"
        self._parent = pointers.read_manifest(self.outlet, path)
        if self._parent is None:
            raise DeltaImpossible(f"the parent {path} is not in {self.outlet.url('')} any more: a base is needed")

    def _sources(self, commit: Commit, stack: ExitStack) -> dict[str, CommitTableRows]:
        """The rows of every table; their stores stay open until the stack ends."""
        request, found = self.request, {}
        for table, section in request.tables.items():
            groups = request.groups or {name: group for group, name in request.slots[table].items()}
            found[table] = stack.enter_context(CommitTableRows(commit, table, section, groups, self.scratch / "rows"))
        return found

    def _tables(
        self, sources: Mapping[str, CommitTableRows], files: ExportFiles
    ) -> tuple[dict[str, TableCounts], dict[str, dict[str, Any]]]:
        """Write the rows of every table -> counts, and the manifest's entries."""
        request, counts, entries = self.request, {}, {}
        for table, section in request.tables.items():
            slots, dtype = SlotNames(request.slots[table]), request.section.dtype
            writer = ExportTableWriter(table, section, slots, dtype, files.open, self.deadline)
            write = writer.base if request.kind == "base" else writer.delta
            counts[table] = write(sources[table], self._selection())
            entries[table] = counts[table].message(slots, section, dtype)
        return counts, entries

    def _slot_files(
        self, commit: Commit, sources: dict[str, CommitTableRows], stack: ExitStack, files: ExportFiles
    ) -> dict[str, Any]:
        """Write histories, counters and statistics, or how they changed; the manifest's entries about them.

        Exports of some tables have none, and so have deltas whose parent has none.
        """
        request, told = self.request, dict[str, Any]()
        since = None if request.kind == "base" else self._since()
        for kind, found in groupby(request.slot_files, key=lambda each: each.kind):
            members = {each.slot: each for each in found}
            continued = self._parent is None or all(each.continues(self._parent) for each in members.values())
            if not (request.whole and continued):
                told[f"without_{kind}"] = sorted(members)
                continue
            told[kind] = {}
            for name, each in members.items():
                if (source := sources.get(each.source)) is None:
                    section, scratch = request.slot_tables[each.source], self.scratch / "rows"
                    rows = CommitTableRows(commit, each.source, section, {each.key: each.group}, scratch)
                    source = stack.enter_context(rows)
                told[kind][name] = write_slot_files(each, source, request.version, since, files.open, self.deadline)
        return told

    def _served(self, sources: Mapping[str, CommitTableRows]) -> ServedRows:
        """The rows of a reader of the export. Without thresholds a reader has every row after a delta, too."""
        section, base = self.request.section, replace(self._selection(), is_base=True)
        whole = section.base_threshold <= 0 and (
            self.request.kind == "base" or (section.delta_threshold <= 0 and section.delta_keep_days is None)
        )

        def find(table: str, keys_U: U64) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
            found_U, weights_UD = sources[table].find(keys_U, base)
            return found_U, as_exported(weights_UD, self.request.tables[table].first_order, section.dtype)

        return ServedRows(find, whole, whole or self.request.kind == "base")

    def _items(self, commit: Commit, served: ServedRows, files: ExportFiles) -> dict[str, Any]:
        """Write the items of a job that retrieves; the manifest's entry about them."""
        if not self.request.catalogue:
            return {}
        stage = self.request.stage
        try:
            described = documents.parse_object((stage / MODEL).read_bytes(), stage / MODEL)
            template = (stage / TEMPLATE).read_bytes()
        except FileNotFoundError:
            return {"items": {"ok": False, "why": "the model could not be traced, or what was prepared for it is lost"}}
        from headrace.trainer.exports.item_file import write_items  # costs some 80 MB; only such jobs need it

        tensors, find = dense_of(commit.folder), served.find
        told = write_items(self.request.catalogue, described, template, tensors, find, files.open, self.deadline)
        return {"items": told}

    def _since(self) -> int:
        return 0 if self.request.parent is None else self.request.parent.version

    def _selection(self) -> RowSelection:
        section = self.request.section
        is_base = self.request.kind == "base"
        cut = ExportCut(
            since=self._since(),
            base_threshold=section.base_threshold,
            delta_threshold=0.0 if is_base or self.request.all else section.delta_threshold,
            delta_keep_days=None if is_base else section.delta_keep_days,
        )
        return RowSelection(cut, self.request.version, is_base)

    def _current_rows(self) -> int | None:
        """Rows of the current export's model. Raises ManifestUnusable where a newer Headrace wrote it."""
        current = pointers.read_current(self.outlet)
        content = None if current is None else pointers.read_manifest(self.outlet, current["path"])
        if content is None:
            return None
        return sum(
            int(content["tables"][table]["model_rows"]) for table in self.request.tables if table in content["tables"]
        )

    def _manifest(
        self,
        counts: Mapping[str, TableCounts],
        tables: Mapping[str, Mapping[str, Any]],
        more: Mapping[str, Any],
        golden: tuple[bool, str] | None,
        files: ExportFiles,
        current_rows: int | None,
    ) -> dict[str, Any]:
        facts = gates.GateFacts(
            window=self.request.facts.get("metrics", {}),
            model_rows=sum(each.model_rows for each in counts.values()),
            current_rows=current_rows,
            norms={table: float(entry["norm"]) for table, entry in tables.items()},
            not_finite=sum(each.not_finite for each in counts.values()),
            golden=golden,
            clicks_unmatched=self.request.facts.get("clicks_unmatched"),
            guards=self.request.facts.get("guards", ()),
            rollback=self.request.facts.get("rollback", ""),
            score=self._score(),
        )
        found = gates.check_gates(self.request.section.gates, facts)
        return manifest.build_manifest(self.request, tables, found, files.written, more)

    def _score(self) -> Score | None:
        """The score of this version, if a gate compares it; None also where the evaluator does not give one in time."""
        gate, commit = self.request.section.gates.evaluator, self.request.commit
        if gate is None:
            return None
        return Scores(commit.parents[1]).wait_for(commit.name, Deadline.after(gate.wait))

    def _follow(self, content: Mapping[str, Any]) -> ExportAnswer:
        """1. current.json, if all gates passed. 2. The donefile. 3. Remove old exports. 4. The user's command."""
        section = self.request.section
        failed = tuple(gate["why"] for gate in content["gates"].values() if not gate["passed"])
        current = pointers.read_current(self.outlet)
        before = [] if current is None else list(current["chain"])
        if not failed and manifest.rolled_back(current, self.request.timeline) >= self.request.version:
            failed = ("rolled back: it was cut before the rollback",)
        mine = pointers.chain_of(self.outlet, content, before)
        if not failed:
            pointers.write_current(self.outlet, content, mine, self.head)  # 1
        pointers.check_head(self.outlet, self.head)
        pointers.add_to_donefile(self.outlet, content, passed=not failed)  # 2
        removed: list[str] = []
        try:
            needed = [*mine, *(before if failed else [])]
            removed = pointers.remove_old_exports(
                self.outlet, section.keep, needed, self.path, self.request.stream
            )  # 3
        except HeadraceError as error:  # the next one tries again
            log.warning("old exports of %s cannot be removed: %s", self.request.stream, error)
        return ExportAnswer(
            name=self.request.name,
            outcome="complete",
            path=self.outlet.url(self.path),
            current=not failed,
            failed_gates=failed,
            command_error=self._command(),  # 4
            rows=sum(table["rows"] for table in content["tables"].values()),
            tombstones=sum(table["tombstones"] for table in content["tables"].values()),
            pending=sum(table["pending"] for table in content["tables"].values()),
            num_bytes=sum(file["bytes"] for file in content["files"].values()),
            removed=tuple(removed),
        )

    def _command(self) -> str | None:
        section = self.request.section
        if not section.command:
            return None
        error = run_command(section.command, self.outlet.url(self.path), self.request.folder, section.command_deadline)
        if error is not None:
            log.warning("the command after export %s failed: %s", self.request.name, error)
        return error


def run_command(command: Sequence[str], address: str, folder: Path, seconds: float) -> str | None:
    """Run the user's command in `folder`, with the export's address as its last argument; no shell, few variables.

    -> why it failed; None where it succeeded.
    """
    name = " ".join(command)
    program = sys.executable if command[0] == "python" else command[0]
    if "/" in program:
        program = str(folder / program)
    if shutil.which(program) is None:
        return f"{name}: no such program on PATH, or it may not be executed; give its path from {folder}"
    try:
        finished = process.run(
            (program, *command[1:], address),
            deadline=Deadline.after(seconds),
            folder=folder,
            environment=process.user_environment(),
            stderr=process.STDOUT,
        )
    except OSError as error:
        return f"{name}: cannot be started: {error}"
    if finished.code is None:
        return f"{name}: did not end in {seconds:g} s (command_deadline) and was killed"
    if finished.code:
        output = finished.output.decode("utf-8", "replace")[-MAX_SHOWN:].strip()
        return f"{name}: ended with {finished.code}; its output: {output}"
    return None
