"""Writes the parts of an export that are not rows: dense tensors, the model as ONNX, golden predictions.

Rank 0 prepared what only it knows of the version (trainer.train.exporting). This module combines it with the tensors
and rows of the commit. The manifest says which parts are missing; rows and tensors alone are a valid export.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from headrace import documents
from headrace.blob.blob_writer import BlobWriter
from headrace.errors import BadInput
from headrace.trainer.checkpoint.commits import CommitDamaged
from headrace.trainer.exports.reader import DENSE, MODEL

if TYPE_CHECKING:
    from headrace.trainer.exports.golden import FindRows

PREFIX = "model."
"""Prefix of the names of a model's tensors in a commit; serving needs no others."""
GOLDEN, TEMPLATE, WHY = "golden.parquet", "onnx-template.onnx", "why.json"
"""The files that rank 0 prepares, as far as it can; WHY says why a file is missing."""
ONNX = "dense.onnx"
LOST = "the job was restarted between this version and its export, and what was prepared for it is lost"

OpenFile = Callable[[str], AbstractContextManager[BlobWriter]]


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """Which parts of the model were written."""

    onnx_ok: bool
    onnx_why: str
    golden_ok: bool | None
    """None: there is nothing to compare."""
    golden_why: str
    max_difference: float | None = None

    @property
    def gate(self) -> tuple[bool, str] | None:
        """For the golden gate."""
        return None if self.golden_ok is None else (self.golden_ok, self.golden_why)

    def message(self) -> dict[str, Any]:
        """As the manifest has it."""
        golden = {"ok": self.golden_ok, "why": self.golden_why, "max_difference": self.max_difference}
        return {"onnx": {"ok": self.onnx_ok, "why": self.onnx_why}, "golden": golden}


@dataclass(frozen=True, slots=True)
class ServedRows:
    """The rows that a reader of the export has, as far as the commit knows them."""

    find: "FindRows"
    whole: bool
    """Whether that is every row as it is now: no threshold excludes any."""
    known: bool
    """Whether the commit knows: not for a delta with thresholds, where readers keep rows of earlier exports."""


def write_model(commit: Path, stage: Path, open_file: OpenFile, served: ServedRows) -> WrittenModel:
    """Write what was prepared. Raises CommitDamaged."""
    tensors = dense_of(commit)
    _put(open_file, DENSE, dense_file(tensors))
    described = _prepared(stage, MODEL)
    if described is not None:
        _put(open_file, MODEL, described)
    why = documents.parse_object(_prepared(stage, WHY) or json.dumps({"onnx": LOST, "golden": LOST}), stage / WHY)
    onnx, onnx_why = _onnx(_prepared(stage, TEMPLATE), tensors, why["onnx"])
    if onnx is not None:
        _put(open_file, ONNX, onnx)
    golden = _prepared(stage, GOLDEN)
    if golden is None or described is None:
        return WrittenModel(onnx is not None, onnx_why, None, why["golden"] or LOST)
    kept, ok, golden_why, difference = _golden(golden, onnx, documents.parse_object(described, stage / MODEL), served)
    if kept is not None:
        _put(open_file, GOLDEN, kept)
    return WrittenModel(onnx is not None, onnx_why, ok, golden_why, difference)


def dense_of(commit: Path) -> dict[str, NDArray[Any]]:
    """A model's tensors by name. Raises CommitDamaged."""
    try:
        with safe_open(commit / DENSE, framework="np") as file:
            names = [name for name in sorted(file.keys()) if name.startswith(PREFIX)]
            return {name.removeprefix(PREFIX): np.asarray(file.get_tensor(name)) for name in names}
    except (OSError, SafetensorError) as error:
        raise CommitDamaged(f"{commit.name}: {DENSE} cannot be read: {error}") from error


def dense_file(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """The file of dense tensors; equal tensors give equal bytes."""
    return save(dict(tensors))


def _onnx(template: bytes | None, tensors: Mapping[str, NDArray[Any]], why: str) -> tuple[bytes | None, str]:
    """The model with its weights, or why there is none."""
    if template is None:
        return None, why or LOST
    from headrace.trainer.exports.onnx_model import (
        with_weights,
    )  # costs some 50 MB; only jobs with a traced model need it

    try:
        return with_weights(template, tensors), ""
    except BadInput as error:
        return None, str(error)


def _golden(
    content: bytes, onnx: bytes | None, model: Mapping[str, Any], served: ServedRows
) -> tuple[bytes | None, bool | None, str, float | None]:
    """The file where it applies to this export, whether the export reproduces it, an explanation, the difference."""
    if left_out := [name for name, table in model["tables"].items() if not table["exported"]]:
        return None, None, f"table {left_out[0]!r} is not exported, and without it nothing can be predicted", None
    if not served.known:
        return None, None, "thresholds exclude rows from deltas: only bases have golden predictions", None
    if onnx is None:
        return content if served.whole else None, None, "there is no ONNX model to predict with", None
    from headrace.trainer.exports import golden as goldens

    try:
        samples = goldens.from_bytes(content)
        found = goldens.replay(samples, onnx, served.find, model)
    except BadInput as error:
        return content, False, str(error), None
    if not served.whole:
        note = "predicted by the exporter, since thresholds exclude rows"
        return goldens.as_bytes(goldens.with_predictions(samples, found.predictions)), True, note, 0.0
    ok = found.difference <= goldens.TOLERANCE
    why = "" if ok else f"predictions differ by {found.difference:.3g}, more than {goldens.TOLERANCE:g}"
    return content, ok, why, found.difference


def _prepared(stage: Path, name: str) -> bytes | None:
    try:
        return (stage / name).read_bytes()
    except FileNotFoundError:
        return None


def _put(open_file: OpenFile, name: str, content: bytes) -> None:
    with open_file(name) as sink:
        sink.write(content)
