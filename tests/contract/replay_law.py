"""The law of replay, asked of every export of a tests.contract.replay_world.World when it is complete.

The truth beside it are the live shards at each close, key for key, and a plain fold over it: which rows an export takes
by the rules, and what a base and the deltas after it then give. `replayed` is what trainer.exports.reader makes of the
files; a base of the same version is made of the same commit, to compare with bit for bit.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.pserver.server.commands import Explain
from headrace.trainer.exports.export_messages import ExportAnswer, ExportRequest
from headrace.trainer.exports.exporter import export
from headrace.trainer.exports.reader import ReadableExport, chain_of, open_export, state_at
from headrace.trainer.exports.row_values import encode
from tests.contract import shards_world as w
from tests.contract.replay_world import GROUPS, KEYS, TABLES

SLOT_OF = {group: slot for slot, group in GROUPS.items()}

TOLD = ("weights", "score", "delta_score", "unseen_days", "changed_version")
Told = dict[str, Any]
"""What the shards tell of a row: see pserver.tables.table_overview.TableOverview.explain."""
Rows = dict[int, tuple[Any, ...]]
"""By key: slot, and the bytes of weight, vector and scale, as the files have them."""


@dataclass
class Law:
    """Checks, and what it has seen: so that a test can ask whether anything was seen at all."""

    scratch: Path
    before: dict[int, dict[str, dict[int, Told]]] = field(default_factory=dict)
    """By version and table, rows before the operations of its close."""
    after: dict[int, dict[str, dict[int, Told]]] = field(default_factory=dict)
    """The same once they acted: the truth at the version."""
    seen: Counter[str] = field(default_factory=Counter)

    # -- what a World tells

    def look(self, shards: Any) -> dict[str, dict[int, Told]]:
        """All rows there are, between passes."""
        asked = {
            table: {key: shards.call(Explain(table, key, group), w.soon()) for key, group in KEYS[table]}
            for table in KEYS
        }
        return {
            table: {key: {name: told[name] for name in TOLD} for key, told in rows.items() if told["row"]}
            for table, rows in asked.items()
        }

    def closed(self, version: int, before: dict[str, dict[int, Told]], after: dict[str, dict[int, Told]]) -> None:
        """A version closed, perhaps again."""
        for seen, now in ((self.before, before), (self.after, after)):
            assert seen.setdefault(version, now) == now, f"version {version} came out otherwise"

    def exported(self, world: Any, request: ExportRequest, answer: ExportAnswer) -> None:
        """An export is complete."""
        made = open_export(answer.path, self.scratch / "opened").check()
        chain = chain_of(made)
        self.seen[made.kind] += 1
        self.seen["longest chain"] = max(self.seen["longest chain"], len(chain))
        base = self._base(world, request) if made.kind == "delta" else made
        for table in request.tables:
            replayed, exported = rows_of(state_at(chain, table)), rows_of(base.rows(table))
            assert exported == self.selected(request, table, request.version, is_base=True), "a base is the truth"
            predicted = self._fold(request, chain, table)
            assert replayed == predicted, f"{request.stream} {request.name} {table}"
            if request.stream != "picky":
                assert replayed == exported, "the law"
            self._check_counts(request, made, table)

    # -- what must be so

    def _base(self, world: Any, request: ExportRequest) -> ReadableExport:
        """A base of the same version, made of the same commit."""
        asked = request.model_copy(update={"kind": "base", "parent": None, "address": str(self.scratch / "bases")})
        if (self.scratch / "bases" / request.job / request.timeline / asked.name).exists():
            asked = asked.model_copy(update={"address": str(self.scratch / f"bases-{self.seen.total()}")})
        answer = export(asked, world.store / "live" / "export-base")
        assert answer.outcome == "complete", answer
        return open_export(answer.path, self.scratch / "opened").check()

    def _fold(self, request: ExportRequest, chain: list[ReadableExport], table: str) -> Rows:
        """What a base and the deltas after it give, by the plain rules."""
        state: Rows = {}
        parent = 0
        for each in chain:
            version, everything = each.version, each.manifest["thresholds"]["delta_threshold"] == 0
            for key in self.went(table, parent, version):
                state.pop(key, None)
            taken = self.selected(request, table, version, each.kind == "base", parent, everything=everything)
            state |= taken
            if each is chain[-1] and each.kind == "delta":
                self._check_tombstones(each, table, parent, taken)
            parent = version
        return state

    def went(self, table: str, since: int, upto: int) -> set[int]:
        """Keys whose rows went after one version up to another, some of which may be back."""
        gone: set[int] = set()
        for version in range(since + 1, upto + 1):
            before, after = self.before[version][table], self.after[version][table]
            earlier = self.after.get(version - 1, {}).get(table, {})
            gone |= (earlier.keys() - before.keys()) | (before.keys() - after.keys())
        return gone

    def _check_tombstones(self, delta: ReadableExport, table: str, parent: int, taken: Rows) -> None:
        """Exactly the keys that went and are not among the rows."""
        found = {int(key) for chunk in delta.tombstones(table) for key in chunk.key_R}
        self.seen["tombstones"] += len(found)
        wanted = self.went(table, parent, delta.version) - taken.keys()
        assert wanted <= found, f"{delta.name} {table}: tombstones are missing"
        there = self.after[delta.version][table]
        assert not found & taken.keys() and found - wanted <= self._ever(table, delta.version) - there.keys()

    def _ever(self, table: str, version: int) -> set[int]:
        """Keys that had a row up to a version."""
        return {key for seen in range(1, version + 1) for key in self.before[seen][table]}

    def selected(
        self,
        request: ExportRequest,
        table: str,
        version: int,
        is_base: bool,
        since: int = 0,
        *,
        everything: bool = False,
    ) -> Rows:
        """The rows an export takes, as its files have them."""
        why = {
            key: self.why_not(request, table, version, key, is_base, since, everything)
            for key in self.after[version][table]
        }
        return {key: self._written(request, table, self.after[version][table][key], key) for key in why if not why[key]}

    def why_not(
        self, request: ExportRequest, table: str, version: int, key: int, is_base: bool, since: int, everything: bool
    ) -> str:
        """Why an export does not take a row that is there: "" where it does."""
        section, row = request.section, self.after[version][table][key]
        if not is_base and row["changed_version"] <= since:
            return "unchanged"
        if row["score"] < np.float32(section.base_threshold):
            return "base_threshold"
        if is_base:
            return ""
        if section.delta_keep_days is not None and row["unseen_days"] > section.delta_keep_days:
            return "delta_keep_days"
        delta_score = self.before[version][table][key]["delta_score"]
        return "" if everything or delta_score >= np.float32(section.delta_threshold) else "delta_threshold"

    def _check_counts(self, request: ExportRequest, made: ReadableExport, table: str) -> None:
        """What the manifest counts, and what an export with a threshold does to delta scores."""
        version, told, is_base = request.version, made.tables[table], made.kind == "base"
        since = 0 if request.parent is None else request.parent.version
        everything = request.all or request.section.delta_threshold == 0
        rows = self.after[version][table]
        why = {key: self.why_not(request, table, version, key, is_base, since, everything) for key in rows}
        kept = Counter(each for each in why.values() if each and each != "unchanged")
        self.seen.update(kept)
        assert (told["pending"], told["pending_by"]) == (kept.total(), dict(kept)), (told, kept)
        assert told["rows"] == sum(not each for each in why.values()) and told["model_rows"] == len(rows)
        for key, row in rows.items() if request.section.delta_threshold > 0 else ():
            before = self.before[version][table][key]["delta_score"]
            assert row["delta_score"] == (before if why[key] else 0.0)

    def _written(self, request: ExportRequest, table: str, row: Told, key: int) -> tuple[Any, ...]:
        weights_RW = np.array([row["weights"]], np.float32)
        values = encode(weights_RW, TABLES[table].first_order, request.section.dtype)
        group = dict(KEYS[table])[key]
        return SLOT_OF[group], *(_bytes(each) for each in (values.weight_R, values.vector_RD, values.scale_R))


def _bytes(array: Any) -> bytes | None:
    return None if array is None else np.ascontiguousarray(array).tobytes()


def rows_of(chunks: Any) -> Rows:
    """Of an export."""
    found: Rows = {}
    for chunk in chunks:
        for place, (slot, key) in enumerate(zip(chunk.names(), chunk.key_R.tolist(), strict=True)):
            assert key not in found, "a key is there once"
            columns = (chunk.weight_R, chunk.vector_RD, chunk.scale_R)
            found[key] = slot, *(None if each is None else _bytes(each[place : place + 1]) for each in columns)
    return found
