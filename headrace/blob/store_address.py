"""Addresses of stores as users write them: parsed and validated without access to the store."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from headrace.relative_names import check_lengths

BUCKET_FORMS = '"s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix?account=NAME"'
"""How addresses in object stores are written, for messages: the one list of them."""
FORMS = f'{BUCKET_FORMS}, "file:///folder" or a folder'
COPY = (
    "Hadoop's file system is not read or written: copy the files to an object store "
    "(`hadoop distcp hdfs://... s3a://bucket/prefix`), or mount it (its NFS gateway) and name the folder"
)
"""The way out for those whose files are in HDFS."""
HADOOP = ("hdfs", "viewfs", "webhdfs", "swebhdfs")
OPTIONS = ("endpoint_override", "scheme", "tls_ca_file_path")
"""Options of every object store."""
BUCKET, REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}"), re.compile(r"[A-Za-z0-9-]{1,64}")
"""Both become parts of a host's name, so they hold no character that could end one."""
ENDPOINT = re.compile(r"(https?://)?(\[[^\]\s]+\]|[^/:?#@\s]+)(:\d+)?(/[^?#@\s]*)?")
"""Of a server: its host, without a user or password."""
ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
"""A storage account of Azure, which becomes part of a host's name, too."""
AZURE_HOSTS = (".dfs.core.windows.net", ".blob.core.windows.net")

MAX_PREFIX_BYTES = 768
"""Longest prefix in a bucket: keys have at most 1,024 bytes, and those of Headrace some 150 of them."""


class StoreKind(StrEnum):
    """Kind of a store: for an object store the scheme of its addresses."""

    FOLDER = "file"
    S3 = "s3"
    GCS = "gs"
    AZURE = "az"


SCHEMES = {
    **{kind.value: kind for kind in (StoreKind.S3, StoreKind.GCS, StoreKind.AZURE)},
    **dict.fromkeys(("abfs", "abfss"), StoreKind.AZURE),
}
"""The kind of object store by the scheme of an address."""
MORE_OPTIONS: Mapping[StoreKind, tuple[str, ...]] = {
    StoreKind.S3: ("region",),
    StoreKind.GCS: (),
    StoreKind.AZURE: ("account",),
}


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a store."""

    text: str
    """The address for people and other processes: absolute, and without secrets."""
    kind: StoreKind
    root: str
    """Bucket (of Azure: container) and prefix, or the folder's path."""
    options: Mapping[str, str]
    """Options of the client: OPTIONS, and MORE_OPTIONS of the kind. Of Azure always the account."""

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine; else it is in an object store."""
        return self.kind is StoreKind.FOLDER

    @property
    def bucket(self) -> str:
        """Name of the bucket or container: the first part of the root."""
        return self.root.partition("/")[0]

    @property
    def place(self) -> str:
        """Where it is, however the address is spelled: kind, account, bucket and prefix, without other options."""
        account = f"{self.options['account']}/" if "account" in self.options else ""
        return self.root if self.is_folder else f"{self.kind}://{account}{self.root}"


def is_object_store(text: str) -> bool:
    """Whether `text` begins as an address in an object store does."""
    return "://" in text and text.partition("://")[0].lower() in SCHEMES


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
    if parts.scheme in SCHEMES:
        return parse_bucket(text)
    _check_no_password(parts)
    _check_no_fragment(parts)
    if parts.scheme != "file":
        raise ValueError(f"{parts.scheme}:// is not supported; {_way_out(parts.scheme, FORMS)}")
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/") or parts.query:
        raise ValueError(f'{text!r} names no folder of this machine; write "file:///folder"')
    check_lengths(unquote(parts.path))
    return StoreAddress(text, StoreKind.FOLDER, unquote(parts.path), {})


def parse_bucket(text: str) -> StoreAddress:
    """The address of an object store in `text`. Raises ValueError with the reason, also for a folder."""
    parts = urlsplit(text)
    if (kind := SCHEMES.get(parts.scheme)) is None or "://" not in text:
        named, forms = f"{parts.scheme}:// is" if parts.scheme else "is", f"one of {BUCKET_FORMS}"
        raise ValueError(f"{named} not the address of an object store; {_way_out(parts.scheme, forms)}")
    _check_no_fragment(parts)
    container, at, host = parts.netloc.rpartition("@")
    if at and kind is StoreKind.AZURE and parts.scheme != "az" and ":" not in container:
        given = {"account": _account_of(host)}
        parts = parts._replace(netloc=container)
    else:
        given = {}
        _check_no_password(parts)
    options = {**given, **_options(parts.query, kind)}
    if given.items() - options.items():
        raise ValueError(
            f"names the account {given['account']!r} as its host, and another one as its option; leave that out"
        )
    if kind is StoreKind.AZURE and not ACCOUNT.fullmatch(options.get("account", "")):
        raise ValueError(
            'names no storage account; write "az://container/prefix?account=NAME", or "abfss://container@NAME'
            f'{AZURE_HOSTS[0]}/prefix"'
        )
    return StoreAddress(text, kind, _root(kind, parts.netloc, parts.path), options)


def other_scheme(text: str) -> str:
    """The way out for an address that is in no object store and no folder, in words; "" for one that is."""
    scheme, is_address, _ = text.partition("://")
    scheme = scheme.lower()
    return _way_out(scheme, f"one of {BUCKET_FORMS}") if is_address and scheme not in (*SCHEMES, "file") else ""


def _way_out(scheme: str, forms: str) -> str:
    return COPY if scheme in HADOOP else f"write {forms}"


def _check_no_password(parts: SplitResult) -> None:
    if "@" in parts.netloc:
        # The message does not repeat the address: it may contain a password.
        raise ValueError(
            "a URI with a user or password in it; credentials come from the environment "
            "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY and so on), a profile or "
            "the instance"
        )


def _check_no_fragment(parts: SplitResult) -> None:
    if parts.fragment:
        raise ValueError(f"has a '#', from which on it would be left out: write %23 before {parts.fragment!r}")


def _account_of(host: str) -> str:
    account, dot, rest = host.partition(".")
    if dot + rest not in AZURE_HOSTS:
        raise ValueError(
            f"{host!r} is no host of Azure's storage: write NAME{AZURE_HOSTS[0]}, or for another cloud "
            '"az://container/prefix?account=NAME&endpoint_override=HOST"'
        )
    return account


def _root(kind: StoreKind, bucket: str, path: str) -> str:
    noun = "container" if kind is StoreKind.AZURE else "bucket"
    if not bucket:
        raise ValueError(f'names no {noun}; write "{kind}://{noun}/prefix"')
    if not BUCKET.fullmatch(bucket):
        raise ValueError(f"{bucket!r} is no name of a {noun}: write letters, digits, '.', '-' and '_'")
    prefix = unquote(path).strip("/")
    if "//" in prefix:
        raise ValueError(f"the prefix {prefix!r} has a part that is empty")
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise ValueError(
            f"has a prefix of {len(prefix.encode())} bytes; at most {MAX_PREFIX_BYTES} leave room for keys"
        )
    return f"{bucket}/{prefix}".rstrip("/")


def _options(query: str, kind: StoreKind) -> dict[str, str]:
    options, known = dict(parse_qsl(query, keep_blank_values=True)), (*OPTIONS, *MORE_OPTIONS[kind])
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(f"unknown options {unknown}; known {sorted(known)}")
    if "region" in options and not REGION.fullmatch(options["region"]):
        raise ValueError(f"{options['region']!r} is no name of a region: write letters, digits and '-'")
    if not ENDPOINT.fullmatch(options.get("endpoint_override", "host")):  # not repeated: it may contain a password
        raise ValueError('the endpoint_override is none: write the host and port of a server, such as "127.0.0.1:9000"')
    if options.get("scheme", "https") not in ("http", "https"):
        raise ValueError(f"scheme={options['scheme']}: the scheme is http or https")
    return options
