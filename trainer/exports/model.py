"""Puts into an export what is not rows: dense tensors, what the chief prepared, the model as ONNX with its weights."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trainer.commits import CommitDamaged
from trainer.exports.outlet import Sink
from trainer.exports.reading import DENSE

PREFIX = "model."
"""Before the names of a model's tensors in a commit; what else is there, serving does not need."""
PREPARED = ("model.json", "golden.parquet")
"""What the chief prepared, and goes into the export as it is."""

OpenFile = Callable[[str], AbstractContextManager[Sink]]


@dataclass(frozen=True, slots=True)
class Model:
    """How the model came out."""

    onnx: Mapping[str, Any]
    """{"ok", "why"}."""
    golden: Mapping[str, Any]
    """{"ok", "why", "max_difference"}."""

    @property
    def gate(self) -> tuple[bool, str] | None:
        """For the golden gate: None where there is nothing to compare."""
        return None if self.golden["ok"] is None else (bool(self.golden["ok"]), str(self.golden["why"]))

    def message(self) -> dict[str, Any]:
        """As the manifest tells it."""
        return {"onnx": dict(self.onnx), "golden": dict(self.golden)}


def write_model(commit: Path, stage: Path, open_file: OpenFile) -> Model:
    """Write what is there to write. Raises CommitDamaged."""
    _put(open_file, DENSE, save(dense_of(commit)))
    for name in PREPARED:
        if (stage / name).is_file():
            _put(open_file, name, (stage / name).read_bytes())
    return Model({"ok": False, "why": "not built"}, {"ok": None, "why": "not built", "max_difference": None})


def dense_of(commit: Path) -> dict[str, NDArray[Any]]:
    """A model's tensors by name. Raises CommitDamaged."""
    try:
        with safe_open(commit / DENSE, framework="np") as file:
            names = [name for name in sorted(file.keys()) if name.startswith(PREFIX)]
            return {name.removeprefix(PREFIX): np.asarray(file.get_tensor(name)) for name in names}
    except (OSError, SafetensorError) as error:
        raise CommitDamaged(f"{commit.name}: {DENSE} cannot be read: {error}") from error


def _put(open_file: OpenFile, name: str, content: bytes) -> None:
    with open_file(name) as sink:
        sink.write(content)
