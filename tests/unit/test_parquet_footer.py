"""Sizes in a footer: those that pyarrow tells of a good file; a damaged or encrypted one never ends the process."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from headrace.dataset.sources.parquet_file import ParquetRows
from headrace.dataset.sources.parquet_footer import BadFooter, row_groups
from headrace.dataset.sources.source_file import LocalFile
from headrace.errors import BadInput

TABLE = pa.table(
    {
        "id": range(7),
        "text": ["x", None] * 3 + ["y"],
        "tags": pa.array([["u"], [], None, ["v", "w"]] + [None] * 3, pa.list_(pa.string())),
        "user": [{"name": "ä", "flag": True}] * 7,
    }
)


def parquet(table: pa.Table = TABLE, **keys) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=3, **keys)
    return out.getvalue()


def footer_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


@pytest.mark.parametrize(
    "keys",
    [{}, {"write_statistics": False, "store_schema": False}, {"use_dictionary": ["text"], "compression": "zstd"}],
)
def test_sizes_are_those_that_pyarrow_tells(keys):
    data = parquet(**keys)
    told = pq.read_metadata(io.BytesIO(data))
    groups = row_groups(footer_of(data))
    assert [group.num_rows for group in groups] == [3, 3, 1]
    for number, group in enumerate(groups):
        for index, column in enumerate(group.columns):
            wanted = told.row_group(number).column(index)
            packed = any("DICTIONARY" in each for each in wanted.encodings)
            assert column == (wanted.num_values, wanted.total_uncompressed_size, packed)


@pytest.mark.parametrize(
    "footer", [b"", b"\x19", b"\x80" * 99, b"\x1c" * 99, b"\x19" * 99, b"\x0d", b"\0", b"\x49\x15\x02"]
)
def test_what_is_no_footer_is_refused(footer):
    with pytest.raises(BadFooter):
        row_groups(footer)


def test_each_byte_of_a_footer_may_be_damaged(tmp_path):
    """pyarrow's `column` of a row group ends the process for some of them."""
    data, path = parquet(TABLE.select(["id"]), write_statistics=False, store_schema=False), tmp_path / "x.parquet"
    refused = 0
    for at in range(len(data) - 8 - len(footer_of(data)), len(data) - 8):
        path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
        rows = ParquetRows(LocalFile(path), growing=False)
        try:
            assert sum(map(len, rows.read(0, rows.count()))) == rows.num_events()
        except BadInput as error:
            refused += "x.parquet" in str(error)
    assert refused > 50


class PlainKeys(pe.KmsClient):
    """Keys that are not hidden."""

    def __init__(self, _config) -> None:
        super().__init__()

    def wrap_key(self, key, _name):
        return key

    def unwrap_key(self, key, _name):
        return key


def test_an_encrypted_column_is_refused_unless_others_are_chosen(tmp_path):
    keys = pe.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["text"]}, plaintext_footer=True, data_key_length_bits=128
    )
    hidden = pe.CryptoFactory(PlainKeys).file_encryption_properties(pe.KmsConnectionConfig(), keys)
    path = tmp_path / "x.parquet"
    pq.write_table(TABLE.select(["id", "text"]), path, encryption_properties=hidden)
    rows = ParquetRows(LocalFile(path), growing=False)
    with pytest.raises(BadInput, match=r"x.parquet: not a Parquet file that can be read: Cannot decrypt"):
        list(rows.read(0, rows.count()))
    rows = ParquetRows(LocalFile(path), growing=False, columns=["id"])
    assert sum(map(len, rows.read(0, rows.count()))) == 7
