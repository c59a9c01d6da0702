"""Secrets of a spec, such as Kafka passwords: never written or shown, and read only where a client is opened.

A secret is text or a reference: { env = "NAME" } is an environment variable, { file = "path" } a file. Text is removed
from a spec as soon as it is loaded, replaced by "***", and passed separately, by the path of its key. So logs, commits
and answers contain references and "***" only.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, PlainSerializer, SecretStr, SerializationInfo

from headrace.errors import SpecError

HIDDEN = "***"
"""In place of a hidden secret."""
SECRET_KEYS = frozenset({"sasl_plain_password", "ssl_password", "sasl_plain_username", "proxy_url", "socks5_proxy"})
"""Keys whose values are secrets, anywhere in a spec."""
MAX_FILE_BYTES = 64 << 10
"""Longest file with a secret."""
FORMS = '{ env = "NAME" } or { file = "path" }'
_REVEALED = object()

Parts = tuple[str, ...]
"""The path of a key, part by part."""


def without_secrets(raw: Any) -> Any:
    """`raw`, a spec or a part of one, with "***" in place of every secret in it; references stay."""
    if isinstance(raw, Mapping):
        return {key: _shown(value) if key in SECRET_KEYS else without_secrets(value) for key, value in raw.items()}
    if isinstance(raw, list | tuple):
        return [without_secrets(part) for part in raw]
    return raw


def without_keys(raw: Any) -> Any:
    """`raw` without secrets and their keys, for comparisons."""
    if isinstance(raw, Mapping):
        return {key: without_keys(value) for key, value in raw.items() if key not in SECRET_KEYS}
    return [without_keys(part) for part in raw] if isinstance(raw, list | tuple) else raw


def secrets_of(raw: Any) -> dict[str, Any]:
    """Secrets given as text in `raw`, by the path of their key."""
    return {".".join(parts): value for parts, value in _secret_keys(raw) if _shown(value) != value}


def with_secrets(raw: Any, secrets: Mapping[str, Any], at: str = "") -> Any:
    """`raw` with `secrets` put back in their places."""
    if isinstance(raw, Mapping):
        paths = {key: f"{at}.{key}" if at else key for key in raw}
        return {key: secrets.get(paths[key], with_secrets(value, secrets, paths[key])) for key, value in raw.items()}
    if isinstance(raw, list | tuple):
        return [with_secrets(part, secrets, f"{at}.{number}") for number, part in enumerate(raw)]
    return raw


def with_secrets_of(old: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """`old`, a logged spec, with the secrets of `present`, the present spec of the same job, at the same keys.

    Where a job has one source, it is the same one under any name.
    """
    found: dict[str, Any] = with_secrets(old, {})
    names = [str(name) for name in found.get("sources", {})]
    for parts, value in _secret_keys(present):
        if parts[0] == "sources" and parts[1] not in names and len(names) == 1:
            parts = ("sources", names[0], *parts[2:])
        section = _section(found, parts[:-1])
        if section is not None:
            section[parts[-1]] = value
    return found


def check_shown(raw: Any) -> None:
    """Raise SpecError if `raw` has "***" in place of a secret: it was copied from a place where secrets are hidden."""
    for parts, value in _secret_keys(raw):
        if value == HIDDEN:
            message = f"is {HIDDEN!r}, which replaces a hidden secret; give the secret, or {FORMS}"
            raise SpecError(message, ".".join(parts))


def is_reference(value: Any) -> bool:
    """Whether `value` is a reference to a secret."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return False
    ((kind, name),) = value.items()
    return kind in ("env", "file") and isinstance(name, str) and name != "" and "\0" not in name


def references_of(raw: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """The path of each key in `raw` that is a reference to a secret, and its kind, "env" or "file"."""
    if is_reference(raw):
        yield at, next(iter(raw))
    elif isinstance(raw, Mapping | list | tuple):
        for key, value in raw.items() if isinstance(raw, Mapping) else enumerate(raw):
            yield from references_of(value, f"{at}.{key}" if at else str(key))


def resolve_secret(value: Any, folder: Path, at: str) -> Any:
    """The secret that `value` is or names; files are relative to `folder`. Raises SpecError naming the key `at`.

    Call it only where a client is opened.
    """
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value == HIDDEN:
        raise SpecError(f"is hidden: logs and commits contain no secrets; the job file must give it, or {FORMS}", at)
    if not is_reference(value):
        return value
    ((kind, name),) = value.items()
    return _of_environment(name, at) if kind == "env" else _of_file(folder / name, at)


def dump_with_secrets(model: BaseModel) -> dict[str, Any]:
    """`model` as JSON-able data with its secrets, for the private file that starts a worker."""
    return model.model_dump(mode="json", context={"secrets": _REVEALED})


def _shown(value: Any) -> Any:
    return value if value is None or is_reference(value) else HIDDEN


def _secret_keys(raw: Any, at: Parts = ()) -> Iterator[tuple[Parts, Any]]:
    """Every secret key in `raw` with its value, in order."""
    if isinstance(raw, Mapping):
        for key, value in raw.items():
            if key in SECRET_KEYS:
                yield (*at, key), value
            else:
                yield from _secret_keys(value, (*at, str(key)))
    elif isinstance(raw, list | tuple):
        for number, part in enumerate(raw):
            yield from _secret_keys(part, (*at, str(number)))


def _section(raw: Any, parts: Parts) -> dict[str, Any] | None:
    for part in parts:
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else None


def _of_environment(name: str, at: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise SpecError(f"the environment variable {name}, which it names, is not set; set it where the job starts", at)
    return value


def _of_file(path: Path, at: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise SpecError(f"the file {path}, which it names, cannot be read: {why}", at) from None
    if not text or len(content) > MAX_FILE_BYTES:
        raise SpecError(f"the file {path}, which it names, is empty, or longer than {MAX_FILE_BYTES} bytes", at)
    return text


def _guarded(options: dict[str, Any]) -> dict[str, Any]:
    for name in sorted(SECRET_KEYS & options.keys()):
        value = options[name]
        if not (value is None or isinstance(value, str | SecretStr) or is_reference(value)):
            raise ValueError(f"{name} is neither text nor a reference: {FORMS}")
    return {
        name: SecretStr(value) if name in SECRET_KEYS and isinstance(value, str) else value
        for name, value in options.items()
    }


def _dumped(options: dict[str, Any], info: SerializationInfo) -> dict[str, Any]:
    if not info.context or info.context.get("secrets") is not _REVEALED:
        return dict(without_secrets(options))
    return {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in options.items()
    }


Options = Annotated[
    dict[str, Any], AfterValidator(_guarded), PlainSerializer(_dumped, return_type=dict[str, Any], when_used="always")
]
"""Options of a client, including secrets, which are dumped as "***"."""
