"""Opens the source of an import: finds its kind by the address."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import BadInput, SpecError
from headrace.pserver.config import TableSection
from headrace.trainer.exports.reader import is_export, open_export
from headrace.trainer.importing.export_source import ExportSource
from headrace.trainer.importing.paddle_source import PaddleSource, is_paddle
from headrace.trainer.importing.parquet_source import ParquetSource, parquets_of
from headrace.trainer.importing.selection import ImportSelection
from headrace.trainer.importing.source import ImportSource


def open_source(
    address: str, tables: Mapping[str, TableSection], choice: ImportSelection, scratch: Path
) -> ImportSource:
    """The source at `address`; fetched files go to `scratch`. Raises BadInput, ExportUnusable, SpecError."""
    if is_export(address, scratch):
        return ExportSource(open_export(address, scratch), statistics=True)
    if "://" in address:
        raise BadInput(f"{address}: is not an export; Paddle text and Parquet are read from local folders only")
    path = Path(address).expanduser()
    if is_paddle(path):
        return PaddleSource(path, _one_section(tables, choice.tables))
    if parquets_of(path):
        return ParquetSource(
            path, next(iter(choice.slots.values())) if choice.slots and len(choice.slots) == 1 else None
        )
    found = "nothing exists there" if not path.exists() else "it has none of these"
    raise BadInput(f"{path}: an export, part files of Paddle, or Parquet files are imported; {found}")


def _one_section(tables: Mapping[str, TableSection], chosen: Sequence[str]) -> TableSection:
    sections = [tables[name] for name in chosen]
    if len({section.dim for section in sections}) > 1:
        each = ", ".join(f"{name} {tables[name].dim}" for name in chosen)
        raise SpecError(f"a text save is for one table; name it, because the dims differ: {each}", "--tables")
    if len({(section.first_order, section.optimizer) for section in sections}) > 1:
        each = ", ".join(f"{name} {tables[name].optimizer.kind}" for name in chosen)
        raise SpecError(f"a text save is for one table; name it, because the optimizers differ: {each}", "--tables")
    return sections[0]
