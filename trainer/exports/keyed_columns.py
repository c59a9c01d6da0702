"""The columns slot, sign and key of rows of one slot in the Parquet files of an export.

Shapes: U keys of a chunk, N rows of a file.
"""

import numpy as np
import pyarrow as pa

from headrace.key_kernels import signs_of
from headrace.pserver.protocol.shards import U64

KEYED = (
    pa.field("slot", pa.dictionary(pa.int32(), pa.string()), nullable=False),
    pa.field("sign", pa.uint64(), nullable=False),
    pa.field("key", pa.uint64(), nullable=False),
)


def keyed_columns(slot: str, sign_N: U64, keys_N: U64) -> list[pa.Array]:
    """The three columns of rows of `slot`."""
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(keys_N), np.int32)), pa.array([slot]))
    return [names, pa.array(sign_N), pa.array(keys_N)]


def signs_in_group(keys_U: U64, group: int) -> U64:
    """(U,) signs of keys of one slot group."""
    sign_U = np.empty(len(keys_U), np.uint64)
    signs_of(keys_U, np.full(len(keys_U), group, np.uint16), sign_U)
    return sign_U
