"""File formats that hold no lines of text, by their first bytes and by the end of their names, and what to do.

The check of a job file goes by names, the reader of a file by its bytes.
"""

from typing import NamedTuple

UNPACK = "which is not read here; unpack it, or pack it with gzip"
BZIP2_BLOCKS = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
"""After "BZh" and a digit: a text may begin with these."""
MAGIC_BYTES = 10
"""First bytes that tell a format."""


class OtherFormat(NamedTuple):
    """A format of files that hold no lines."""

    suffixes: tuple[str, ...]
    magic: bytes | None
    """Its first bytes; None: a text may begin with them."""
    words: str
    """Its name, and what to do."""


OTHER_FORMATS = (
    OtherFormat((".zst", ".zstd"), b"\x28\xb5\x2f\xfd", f"zstd, {UNPACK}"),
    OtherFormat((".bz2",), b"BZh", f"bzip2, {UNPACK}"),
    OtherFormat((".xz",), b"\xfd7zXZ\x00", f"xz, {UNPACK}"),
    OtherFormat((".zip",), b"PK\x03\x04", f"a zip archive, {UNPACK}"),
    OtherFormat((".lz4",), b"\x04\x22\x4d\x18", f"lz4, {UNPACK}"),
    OtherFormat((".snappy",), b"\xff\x06\x00\x00sNaPpY", f"snappy, {UNPACK}"),
    OtherFormat((".parquet",), b"PAR1\x15", 'Parquet; set format = "parquet" of its source'),
    OtherFormat(
        (".avro",),
        b"Obj\x01",
        "an Avro file, which is not read as a file; write its records as lines of JSON, or as Parquet",
    ),
    OtherFormat(
        (".arrow", ".feather"), b"ARROW1\x00\x00", "an Arrow file, which is not read here; write it as Parquet"
    ),
    OtherFormat((".orc",), None, "an ORC file, which is not read here; write it as Parquet"),
)


def format_of_bytes(head: bytes) -> str | None:
    """The format of a file with these first bytes, and what to do, if it is known to hold no lines."""
    found = next((each.words for each in OTHER_FORMATS if each.magic and head.startswith(each.magic)), None)
    return None if head.startswith(b"BZh") and not head.startswith(BZIP2_BLOCKS, 4) else found


def format_of_name(path: str) -> str | None:
    """The same for a file of this name."""
    return next((each.words for each in OTHER_FORMATS if path.lower().endswith(each.suffixes)), None)
