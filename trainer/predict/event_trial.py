"""Predicts a few pasted events with a commit, and tells which rows are missing: a process.

service.predict.event_trials starts the process, and asks it over a socket: JSON, one message a line. The first one is a
TrialConfig; each TrialQuestion after it gets one answer. Rows are looked up in the stores of the commit, and none is
restored, so that an answer takes as long for a large table as for a small one. Nothing is written or learnt.

Shapes: B samples, P of a padded batch, U unique keys, D floats of a row.
"""

import argparse
import json
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import documents, lifecycle, worker_process
from headrace.config import Section, validate
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import F32, Samples
from headrace.dataset.sources.kinds import open_sources
from headrace.dataset.spec.config import OnBadEvent, Opening, SlotKind
from headrace.dataset.spec.schema import Schema, Slot
from headrace.dataset.stream.scripted_source import MemorySource, ScriptedRecord
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError
from headrace.key_kernels import keys_of
from headrace.keys import sign_of_text
from headrace.printable import printable
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import ABSENT_BITS, U64
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.trainer.checkpoint.commits import Commit, read_commit
from headrace.trainer.config import TrainerJob
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.kept_state import filled_as_of
from headrace.trainer.journal.log import read
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.predict.commit_statistics import CommitStatistics
from headrace.trainer.predict.fixed_batches import FixedBatch, FixedBatches
from headrace.trainer.predict.joined_labels import split
from headrace.trainer.predict.predictor import Predictor
from headrace.trainer.predict.worker import masks_of
from headrace.trainer.spec.history_tables import history_tables
from headrace.trainer.train.device import set_up_torch

IDLE_S = 300.0
"""A process that nobody asks for so long ends."""
BATCH = 64
MAX_SAMPLES = 256
"""Most samples of an answer; the others are counted."""
MAX_TOLD = 8 << 20
"""Most characters of the samples of an answer, as JSON; the reader takes answers of twice as many."""
MAX_VALUES = 64
"""Most values of a slot of a sample that are told."""
MAX_EXAMPLE, EXAMPLE_S = 32 << 10, 5.0
"""Longest recent event that is told, in characters; longest time to read it."""
MAX_SEGMENTS = 8
"""Most segments that are looked at for one, the newest first."""
OWN_GROUP = "-try"
"""Of the Kafka groups that read it."""
PARTITION = "memory/0"
PLACE = re.compile(rf"{PARTITION} at (\d+)(?:, output line (\d+))?")
TEXTS = re.compile(r"[^\s,;|]+")
"""The texts of an event that is no JSON."""


class TrialConfig(Section):
    """The job whose versions predict."""

    job: dict[str, Any]
    """The whole spec."""
    folder: Path
    """Folder of the job file."""
    log: Path
    """Folder of the job's log."""
    scratch: Path
    """Folder for open stores, on the disk of the commits."""


class TrialQuestion(Section):
    """Events to predict."""

    number: int
    """Of the question; its answer has it, too."""
    commit: Path
    """Folder of the version."""
    events: tuple[str, ...]
    """Without any, all is made ready for the next question."""
    example: bool = False
    """Whether the answer has a recent event of the job's stream, too."""


class CommitRows:
    """The rows of a commit by their keys. A context: stores stay open, once read."""

    def __init__(self, commit: Commit, job: TrainerJob, schema: Schema, scratch: Path) -> None:
        """`scratch`: a folder for the open stores, of this object alone."""
        self._commit, self._schema, self._scratch, self._tables = commit, schema, scratch, job.tables
        self._kept = history_tables(schema)
        self._held, self._opened = ExitStack(), dict[str, CommitTableRows]()
        self._statistics = self._held.enter_context(
            CommitStatistics(commit, schema, job.tables, scratch / "statistics")
        )
        self._whole = RowSelection(ExportCut(since=0), commit.version, is_base=True)

    def __enter__(self) -> "CommitRows":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def of_batch(self, batch: FixedBatch) -> tuple[dict[str, F32], dict[str, set[int]]]:
        """By table, (U, D) rows of the keys of a batch as inference reads them, and the keys without a row."""
        rows, missing = dict[str, F32](), dict[str, set[int]]()
        for look in batch.lookups:
            name, keys_U = look.table.name, look.keys.keys_U
            groups = {slot.name: slot.group for slot in self._schema.sparse if slot.sparse.table == name}
            found_U, rows_UD = self._open(name, self._tables[name], groups).find(keys_U, self._whole)
            if self._tables[name].learns_default_row:
                rows_UD.view(np.uint32)[~found_U] = ABSENT_BITS
            rows[name], missing[name] = rows_UD, set(keys_U[~found_U].tolist())
        return rows, missing

    def kept(self, table: str, group: int, keys_U: U64) -> F32:
        """Rows of histories, counters and statistics; a RowsOf."""
        if table in self._statistics:
            return self._statistics.of(table, keys_U)
        return self._open(table, self._kept[table], {table: group}).weights(keys_U)

    def _open(self, table: str, section: TableSection, groups: Mapping[str, int]) -> CommitTableRows:
        if table not in self._opened:
            rows = CommitTableRows(self._commit, table, section, groups, self._scratch / "rows")
            self._opened[table] = self._held.enter_context(rows)
        return self._opened[table]


class EventTrial:
    """Answers questions about one job. A context; one thread."""

    def __init__(self, config: TrialConfig) -> None:
        """Raises SpecError."""
        self._config, self._job = config, (job := validate(TrainerJob, config.job, only_known=True))
        self._schema, self._scratch, self._number = Schema.of(job.slots), config.scratch, 0
        set_up_torch(job.train.model_copy(update={"threads": 1, "amp": "off"}), 1, torch.device("cpu"))
        self._predictor = Predictor(job, self._schema, config.folder, [])
        self._batches = FixedBatches(tables_of(self._schema, job.tables, None), BATCH)
        self._source = MemorySource([[]])
        self._reader = SegmentReader(
            self._source,
            job.pipe.model_copy(update={"processes": 1, "on_bad_event": OnBadEvent.SKIP}),
            self._schema.emitted,
            next(iter(job.sources.values())),
            None,
            config.folder,
            masks=masks_of(job, self._schema),
        )
        self._commit: Path | None = None
        self._held = ExitStack()

    def __enter__(self) -> "EventTrial":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._held.close()

    def answer(self, question: TrialQuestion) -> dict[str, Any]:
        """The samples of the events with their predictions, and the rejected events. Raises HeadraceError."""
        self._open(question.commit)
        asked = question.example
        example = recent_event(self._job, self._config.folder, self._config.log) if asked else None
        tally, told, num_samples, room = PassTally(), list[dict[str, Any]](), 0, MAX_TOLD
        for block in self._blocks(question.events, tally):
            num_samples += len(block)
            wanted = min(len(block), MAX_SAMPLES - len(told)) if room >= 0 else 0
            for sample in self._predicted(block.slice(0, wanted), question.events):
                room -= len(json.dumps(sample))
                if room < 0:
                    break
                told.append(sample)
        rejected = [
            {"reason": reason, "events": number, "first": place_words(tally.first_of[reason])}
            for reason, number in tally.rejected.items()
        ]
        return {"samples": told, "left_out": num_samples - len(told), "rejected": rejected, "example": example}

    def _open(self, folder: Path) -> None:
        """Predict with this commit from now on."""
        if folder == self._commit:
            return
        self._held.close()
        self._commit, self._number = None, self._number + 1
        self._predictor.load(folder)
        scratch = self._scratch / str(self._number)
        self._rows = self._held.enter_context(CommitRows(read_commit(folder), self._job, self._schema, scratch))
        self._commit = folder

    def _blocks(self, events: Sequence[str], tally: PassTally) -> Iterator[Samples]:
        if not events:
            return
        now_ms = int(time.time() * 1000)
        self._source.recreate(0, [ScriptedRecord(each.encode(), now_ms) for each in events])
        for emitted in self._reader.read(self._number, [Segment(PARTITION, 0, 0, len(events))], tally):
            impressions = emitted if self._job.join is None else split(emitted, self._job.join)[0]
            yield filled_as_of(impressions, self._schema, self._rows.kept)

    def _predicted(self, samples: Samples, events: Sequence[str]) -> Iterator[dict[str, Any]]:
        texts = [text_signs(each) for each in events]
        for batch in self._batches.block(samples).batches:
            rows, missing = self._rows.of_batch(batch)
            found = self._predictor.predict(batch, rows).prediction_B
            for place in range(batch.num_samples):
                event, time_s = int(batch.samples.event_B[place]), float(batch.samples.time_s_B[place])
                names = texts[event] if 0 <= event < len(texts) else {}
                yield {
                    "event": event,
                    "time": _finite(time_s),
                    "predictions": {task: _finite(float(values[place])) for task, values in found.items()},
                    "slots": [told_slot(slot, batch.samples, place, missing, names) for slot in self._schema.slots],
                }


def recent_event(job: TrainerJob, folder: Path, log: Path) -> str | None:
    """The first event of the newest planned pass, as a line of text; None where it is none, or cannot be read in time.

    Called on the main thread. A source may have to read a file from its beginning, so a signal ends it after EXAMPLE_S.
    """

    def end(*_: object) -> None:
        raise DeadlineExceeded("the example takes too long")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, EXAMPLE_S)
    try:
        text = _first_event(job, folder, log, Deadline.after(EXAMPLE_S)).decode()
    except Exception:  # noqa: BLE001  # sources may be others' code; an example alone, and people go on without it
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    is_line = printable(text) == text and "\n" not in text
    return text if is_line and 0 < len(text) <= MAX_EXAMPLE else None


def _first_event(job: TrainerJob, folder: Path, log: Path, deadline: Deadline) -> bytes:
    """The first event with content of the newest planned passes; b"" for none."""
    sources = {name: each.model_copy(update=each.beside(job.name, OWN_GROUP)) for name, each in job.sources.items()}
    plans = [record.content for record in read(log) if isinstance(record.content, PassPlan)]
    segments = [segment for plan in reversed(plans) for rank in plan.segments for segment in rank]
    opening = Opening(folder=folder, job=job.name + OWN_GROUP, seed=job.seed, deadline=deadline, known=None)
    with closing(open_sources(sources, opening)) as source:
        for segment in segments[:MAX_SEGMENTS]:
            for block in source.read(segment, deadline):
                for value in (block.value(at) for at in range(len(block))):
                    if value:
                        return value
    return b""


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def told_slot(
    slot: Slot, samples: Samples, place: int, missing: Mapping[str, set[int]], texts: Mapping[int, str]
) -> dict[str, Any]:
    """One slot of a sample: its values as text, and those of them that have no row."""
    if slot.kind is not SlotKind.SPARSE:
        values = samples.dense[slot.name][place] if slot.kind is SlotKind.DENSE else samples.meta[slot.name][[place]]
        return {"name": slot.name, "kind": slot.kind.value, "values": _shown(values), "missing": [], "more": 0}
    column = samples.sparse[slot.name]
    sign_N = column.values_N[column.offset_B1[place] : column.offset_B1[place + 1]]
    key_N = np.empty(len(sign_N), np.uint64)
    keys_of(sign_N, slot.group, key_N)
    values = [texts.get(sign, str(sign)) for sign in sign_N[:MAX_VALUES].tolist()]
    without = [value for value, key in zip(values, key_N.tolist(), strict=False) if key in missing[slot.sparse.table]]
    more = max(0, len(sign_N) - MAX_VALUES)
    return {"name": slot.name, "kind": slot.kind.value, "values": values, "missing": without, "more": more}


def _shown(values: Any) -> list[str]:
    return [f"{each:.6g}" if isinstance(each, float) else str(each) for each in values[:MAX_VALUES].tolist()]


def place_words(rejection: str) -> str:
    """A rejection as text, with the number of its event from 1, or of its output line where events are not traced."""
    found = PLACE.match(rejection)
    if found is None:
        return rejection
    place = f"output line {found[2]}" if found[2] else f"event {int(found[1]) + 1}"
    return f"{place}{rejection[found.end() :]}"


def text_signs(event: str) -> dict[int, str]:
    """The texts of an event by their signs: a sign alone tells a person nothing."""
    try:
        found = _leaves(documents.parse(event, "an event"))
    except ValueError:
        found = TEXTS.findall(event)
    return {sign_of_text(text.encode("utf-8", "replace")): text for text in found}


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [text for each in (value.values() if isinstance(value, dict) else value) for text in _leaves(each)]
    return [value] if isinstance(value, str) else []


def serve(link: socket.socket) -> None:
    """Answer until the other end closes the socket, or asks nothing for IDLE_S."""
    lines = link.makefile("rb")
    config = validate(TrialConfig, documents.parse(lines.readline(), "the job"))
    with ExitStack() as held:
        trial: EventTrial | None = None
        link.settimeout(IDLE_S)
        while line := _next(lines):
            question = validate(TrialQuestion, documents.parse(line, "a question"))
            try:
                if trial is None:
                    trial = held.enter_context(EventTrial(config))
                answer = trial.answer(question)
            except HeadraceError as error:
                answer = {"error": str(error)}
            link.sendall(json.dumps({"number": question.number, **answer}).encode() + b"\n")


def _next(lines: Any) -> bytes:
    try:
        line: bytes = lines.readline()
    except TimeoutError:
        return b""
    return line


def main() -> None:
    """Run the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True, metavar="DESCRIPTOR")
    arguments = parser.parse_args()

    def start() -> None:
        worker_process.begin("trial")
        with socket.socket(fileno=arguments.socket) as link:
            serve(link)

    lifecycle.run_to_end(start)


if __name__ == "__main__":
    main()
