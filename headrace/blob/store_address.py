"""Addresses of stores as users write them: parsed and validated without access to the store."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from headrace.relative_names import check_lengths

FORMS = '"s3://bucket/prefix", "file:///folder" or a folder'
S3_OPTIONS = ("endpoint_override", "region", "scheme", "tls_ca_file_path")
BUCKET, REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}"), re.compile(r"[A-Za-z0-9-]{1,64}")
"""Both become parts of a host's name, so they hold no character that could end one."""

MAX_PREFIX_BYTES = 768
"""Longest prefix in a bucket: S3 takes keys of 1,024 bytes, and those of Headrace have some 150 at most."""


class StoreKind(StrEnum):
    """Kind of a store."""

    FOLDER = "folder"
    S3 = "s3"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a store."""

    text: str
    """The address for people and other processes: absolute, and without secrets."""
    kind: StoreKind
    root: str
    """Bucket and prefix, or the folder's path."""
    options: Mapping[str, str]
    """Options of the S3 client: some of S3_OPTIONS."""

    @property
    def bucket(self) -> str:
        """Name of the bucket: the first part of an S3 root."""
        return self.root.partition("/")[0]


def parse(text: str, folder: Path | None = None) -> StoreAddress:
    """The address in `text`; a relative folder starts at `folder`. Raises ValueError with the reason."""
    if "://" not in text:
        if not text:
            raise ValueError(f"is empty; write {FORMS}")
        if "\0" in text:
            raise ValueError("holds a NUL character, which no path may")
        path = (folder or Path()) / Path(text).expanduser()
        check_lengths(str(path.absolute()))
        return StoreAddress(str(path), StoreKind.FOLDER, str(path.absolute()), {})
    parts = urlsplit(text)
    if "@" in parts.netloc:
        # The message does not repeat the address: it may contain a password.
        raise ValueError(
            "a URI with a user or password in it; credentials come from the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a profile or the instance"
        )
    match parts.scheme:
        case "s3":
            return StoreAddress(text, StoreKind.S3, _s3_root(parts.netloc, parts.path), _s3_options(parts.query))
        case "file":
            if parts.netloc not in ("", "localhost") or not parts.path.strip("/") or parts.query:
                raise ValueError(f'{text!r} names no folder of this machine; write "file:///folder"')
            check_lengths(unquote(parts.path))
            return StoreAddress(text, StoreKind.FOLDER, unquote(parts.path), {})
        case _:
            raise ValueError(f"{parts.scheme}:// is not supported; write {FORMS}")


def _s3_root(bucket: str, path: str) -> str:
    if not bucket:
        raise ValueError('names no bucket; write "s3://bucket/prefix"')
    if not BUCKET.fullmatch(bucket):
        raise ValueError(f"{bucket!r} is no name of a bucket: write letters, digits, '.', '-' and '_'")
    prefix = unquote(path).strip("/")
    if "//" in prefix:
        raise ValueError(f"the prefix {prefix!r} has a part that is empty")
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise ValueError(
            f"has a prefix of {len(prefix.encode())} bytes; at most {MAX_PREFIX_BYTES} leave room for keys"
        )
    return f"{bucket}/{prefix}".rstrip("/")


def _s3_options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(S3_OPTIONS)):
        raise ValueError(f"unknown options {unknown}; known {sorted(S3_OPTIONS)}")
    if "region" in options and not REGION.fullmatch(options["region"]):
        raise ValueError(f"{options['region']!r} is no name of a region: write letters, digits and '-'")
    if options.get("scheme", "https") not in ("http", "https"):
        raise ValueError(f"scheme={options['scheme']}: the scheme is http or https")
    return options
