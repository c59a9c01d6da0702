"""`Export`: reads rows of an export, and predicts with it, as a replica does; it imports no torch.

trainer.exports.reader reads the files, trainer.replica.replica_state holds what predicts.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import pyarrow as pa

from headrace.errors import SpecError
from headrace.extras import require
from headrace.service.python.exported_items import ExportedItems
from headrace.service.python.inference_columns import Columns, Event, predictions_of, request_of, table_of
from headrace.trainer.exports.destination import ExportFolder, ExportUnusable
from headrace.trainer.exports.item_file import index_in
from headrace.trainer.exports.reader import chain_of, open_export, open_folder, parent_of, state_at
from headrace.trainer.exports.row_chunks import RowChunk, concatenate
from headrace.trainer.replica.export_updates import CurrentExport, read
from headrace.trainer.replica.inference_messages import RequestReader, checked_outputs
from headrace.trainer.replica.replica_state import ReplicaState
from headrace.trainer.serving.slot_layout import InferenceInputs
from headrace.validation import no_such

MAX_BATCH = 4096
"""Most samples that are predicted at a time."""


class ExportedRows(NamedTuple):
    """The rows of a slot as arrays: R rows, D numbers of a vector."""

    sign: Any
    """(R,) feature ids: uint64; int64 with the same bits in torch. Texts are hashed: `headrace.signs` hashes them."""
    weight: Any
    """(R,) first-order weights, float32; None without."""
    vector: Any
    """(R, D) vectors, float32; None without."""


class Export:
    """An export with all that it builds on: a model at one version. `apply` brings it to the version of a delta."""

    def __init__(self, address: str) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="headrace-export-"))
        """Files that are fetched from an object store; it goes with the export."""
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self._chain = chain_of(open_export(address, self._scratch))
        self._state: ReplicaState | None = None

    @classmethod
    def open(cls, address: str | Path) -> "Export":
        """The export in a folder, or in an object store ("s3://bucket/prefix"): a base or a delta.

        Of a folder with current.json, the export that it names. Raises ExportUnusable.
        """
        return cls(str(address))

    def __repr__(self) -> str:
        return f"<headrace export {self._newest.name} of {self.job}>"

    @property
    def _newest(self) -> Any:
        return self._chain[-1]

    @property
    def job(self) -> str:
        """Name of the job."""
        return str(self._newest.manifest["job"])

    @property
    def version(self) -> int:
        """The version of the model."""
        return int(self._newest.version)

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the newest export: tables, files, gates, event time."""
        return dict(self._newest.manifest)

    def model(self) -> dict[str, Any]:
        """The content of model.json: slots, tables, tasks, and the rules of prediction."""
        return dict(self._newest.model())

    def slots(self) -> dict[str, str]:
        """The table of each sparse slot."""
        return {name: each["table"] for name, each in self._sparse().items()}

    def _sparse(self) -> dict[str, Any]:
        return {each["name"]: each for each in self.model()["slots"] if each["kind"] == "sparse"}

    @overload
    def rows(self, slot: str, form: Literal["arrow"] = "arrow") -> pa.Table: ...
    @overload
    def rows(self, slot: str, form: Literal["numpy", "torch"]) -> ExportedRows: ...
    def rows(self, slot: str, form: Literal["arrow", "numpy", "torch"] = "arrow") -> pa.Table | ExportedRows:
        """All rows of a slot, with those that it shares: "sign", and "weight" and "vector" where the table has them.

        Values are float32, whatever the export stores. Raises SpecError, ExportUnusable.
        """
        sparse = self._sparse()
        if slot not in sparse:
            raise SpecError(no_such("sparse slot", slot, list(sparse)))
        chunks = [*self._chunks(sparse[slot]["table"], sparse[slot]["rows_of"])]
        if not chunks:
            found = self._without_rows(sparse[slot]["table"])
        else:
            one = concatenate(chunks)
            found = ExportedRows(one.sign_R, one.weight_R, one.vector_RD)
        match form:
            case "arrow":
                return _arrow(found)
            case "numpy":
                return found
            case "torch":
                return _torch(found)

    def _chunks(self, table: str, slot: str) -> Iterator[RowChunk]:
        """The rows of a slot, decoded."""
        for chunk in state_at(self._chain, table):
            if slot in chunk.slots:
                of_slot = chunk.take(chunk.slot_R == chunk.slots.index(slot))
                if len(of_slot):
                    yield of_slot.decoded()

    def _without_rows(self, table: str) -> ExportedRows:
        facts = self._newest.tables[table]
        weight = np.empty(0, np.float32) if facts["first_order"] else None
        vector = np.empty((0, facts["dim"]), np.float32) if facts["dim"] else None
        return ExportedRows(np.empty(0, np.uint64), weight, vector)

    def predict(
        self,
        columns: Columns | None = None,
        *,
        events: Sequence[Event] | None = None,
        event_time: Sequence[float] | None = None,
        outputs: Sequence[str] = (),
    ) -> pa.Table:
        """Predict samples, as `Replica.predict` does: the same arguments, columns and bits.

        The first call loads all rows into memory. Raises SpecError, BadInput, ExportUnusable.
        """
        state = self._predicting()
        reader = RequestReader(state.model(), MAX_BATCH)
        named = {"outputs": [{"name": each} for each in outputs]}
        parts = []
        for inputs in _batches(reader, columns, events, event_time):
            wanted = reader.outputs(named, inputs.num_samples)
            done = state.predict(reader.model, inputs)
            assert done is not None, "nobody else changes the state"
            parts.append(checked_outputs(done[1], wanted, inputs.events))
        if not parts:
            raise SpecError("the events have no sample")
        whole = {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}
        return predictions_of(whole, str(self.version))

    def index(self) -> ExportedItems:
        """The items of a job with `[retrieval]`, with their vectors by this version, to be searched.

        Raises ExportUnusable where the export has none.
        """
        return ExportedItems(index_in(self._newest.check()), self.version)

    def apply(self, delta: str | Path) -> None:
        """Go on to the version of a delta that builds on this one. Raises ExportUnusable, and then changes nothing."""
        export = open_folder(ExportFolder(str(delta), self._scratch)).check()
        parent = parent_of(export)
        if parent is None or (parent.name, parent.manifest["timeline"]) != (
            self._newest.name,
            self._newest.manifest["timeline"],
        ):
            wanted = "it is a base" if parent is None else f"it builds on {parent.name}"
            raise ExportUnusable(f"{delta}: does not follow {self._newest.name}: {wanted}; use Export.open")
        if self._state is not None:
            self._state.apply(read([export], self._current(export), whole=False))
        self._chain.append(export)

    def _predicting(self) -> ReplicaState:
        """The state that predicts, at the version of the chain."""
        if self._state is None:
            state = ReplicaState(max_versions=1, max_bytes=0)
            state.apply(read([each.check() for each in self._chain], self._current(self._newest), whole=True))
            self._state = state
        return self._state

    def _current(self, export: Any) -> CurrentExport:
        return CurrentExport(str(export.manifest["timeline"]), int(export.version), (export.name,))


def _batches(
    reader: RequestReader,
    columns: Columns | None,
    events: Sequence[Event] | None,
    event_time: Sequence[float] | None,
) -> Iterator[InferenceInputs]:
    """The samples, as many at a time as are predicted at a time."""
    if columns is None or events is not None:
        yield from reader.batches_of_events(request_of(columns, events, event_time, ()))
        return
    table = table_of(columns, event_time)
    for begin in range(0, max(len(table), 1), reader.max_batch):
        yield reader.inputs(request_of(table.slice(begin, reader.max_batch), None, None, ()))


def _arrow(rows: ExportedRows) -> pa.Table:
    columns = {"sign": pa.array(rows.sign)}
    if rows.weight is not None:
        columns["weight"] = pa.array(rows.weight)
    if rows.vector is not None:
        numbers = pa.array(np.ascontiguousarray(rows.vector).reshape(-1))
        columns["vector"] = pa.FixedSizeListArray.from_arrays(numbers, rows.vector.shape[1])
    return pa.table(columns)


def _torch(rows: ExportedRows) -> ExportedRows:
    require("torch", 'rows(..., "torch")')
    torch = import_module("torch")  # late: nothing else here needs it, and the control plane starts without it
    arrays = (rows.sign.view(np.int64), rows.weight, rows.vector)
    return ExportedRows(*(None if each is None else torch.from_numpy(np.array(each)) for each in arrays))
