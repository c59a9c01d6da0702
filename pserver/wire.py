"""Arrays to bytes of messages and back. Nothing is copied on the way back: arrays read are read-only."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pserver.client import F32, Gradients, Keys
from pserver.config import TableSection
from pserver.errors import BadRequest
from pserver.proto import shard_pb2 as pb

FORMAT = 1
"""Number of the messages' meaning; both ends must have the same."""


def tables_json(tables: Mapping[str, TableSection]) -> bytes:
    """The tables' sections as text that is alike where they are."""
    sections = {name: section.model_dump(mode="json") for name, section in tables.items()}
    return json.dumps(sections, sort_keys=True).encode()


def _array(data: bytes, dtype: Any) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadRequest(f"{len(data)} bytes are no array of {np.dtype(dtype)}")
    return np.frombuffer(data, dtype)


def keys_to(table: str, keys: Keys) -> Any:
    """TableKeys of some keys."""
    return pb.TableKeys(table=table, keys=keys.keys_U.tobytes(), groups=keys.group_U.tobytes())


def keys_from(tables: Iterable[Any]) -> dict[str, Keys]:
    """Keys by table, of TableKeys messages."""
    found = {}
    for message in tables:
        keys = Keys(_array(message.keys, np.uint64), _array(message.groups, np.uint16))
        if len(keys.keys_U) != len(keys.group_U):
            raise BadRequest(f"table {message.table!r}: {len(keys.keys_U)} keys, {len(keys.group_U)} slot groups")
        found[message.table] = keys
    return found


def gradients_to(table: str, gradients: Gradients) -> Any:
    """TableGradients of a push."""
    return pb.TableGradients(
        table=table,
        grads=gradients.grads_UD.tobytes(),
        shows=gradients.show_U.tobytes(),
        clicks=gradients.click_U.tobytes(),
    )


def gradients_from(tables: Iterable[Any]) -> dict[str, Gradients]:
    """Gradients by table, of TableGradients messages; their width follows from shows."""
    found = {}
    for message in tables:
        show_U, grads = _array(message.shows, np.float32), _array(message.grads, np.float32)
        if len(show_U) == 0:
            continue  # no key of the table lives on this shard: nothing to apply, and no width to tell
        if len(grads) % len(show_U):
            raise BadRequest(f"table {message.table!r}: {len(grads)} gradients for {len(show_U)} keys")
        click_U = _array(message.clicks, np.float32)
        found[message.table] = Gradients(grads.reshape(len(show_U), -1), show_U, click_U)
    return found


def rows_to(rows: Mapping[str, F32]) -> Any:
    """RowsReply of rows by table."""
    return pb.RowsReply(tables=[pb.TableRows(table=name, rows=rows_UD.tobytes()) for name, rows_UD in rows.items()])


def rows_from(reply: Any, widths: Mapping[str, int]) -> dict[str, F32]:
    """(U, D) rows by table of a RowsReply."""
    return {m.table: _array(m.rows, np.float32).reshape(-1, widths[m.table]) for m in reply.tables}
