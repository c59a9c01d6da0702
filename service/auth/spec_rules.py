"""Checks what a spec that arrives over the API names: commands, models, brokers and folders, by `allow` of the service.

Every key of every section is visited. `holds` of a section says for each key that can hold free text which kind of text
it is. A key that is not listed is refused once it is set, so that a new key cannot be forgotten. Sizes are checked by
service.auth.spec_sizes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, assert_never, get_args, get_origin

from pydantic import BaseModel

from headrace.address import LOOPBACK_INTERFACE, is_loopback, parse_address
from headrace.dataset.sources.kafka_options import FILE_OPTIONS
from headrace.errors import SpecError
from headrace.secrets import SECRET_KEYS, is_reference
from headrace.service.auth.allowed_paths import NONE_RESERVED, AllowedPaths, ReservedPaths
from headrace.service.auth.config import ANY_MORE, AllowSection
from headrace.service.spec.job import LoadedJob
from headrace.text_kinds import TextKind
from headrace.trainer.models.registry import MODELS
from headrace.trainer.own_metrics import METRICS
from headrace.trainer.predict.prediction_plan import names_commit, servers_of

MAX_NAME = 128
NAME = re.compile(r"[^/\\\x00-\x1f\x7f]+")


KAFKA_TEXTS = (
    "bootstrap_servers client_dns_lookup client_id client_rack isolation_level sasl_mechanism sasl_plain_password "
    "sasl_plain_username security_protocol ssl_ciphers ssl_password"
).split()
"""Kafka options that may hold text. Proxies are not among them, as they could be any host, nor are Kerberos names."""
OWN_CREDENTIALS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
"""Mechanisms that send credentials from the spec; all others send those of the service."""


def check_spec(
    job: LoadedJob,
    allow: AllowSection,
    own: Path | None,
    private: Sequence[Path] = (),
    reserved: ReservedPaths = NONE_RESERVED,
) -> None:
    """Raise SpecError at the first key of `job` that names something that is not allowed.

    `own` is the job's own folder. `private` are paths that no spec may reach, even below an allowed root; `reserved`
    those of other jobs. Check again whenever workers are started.
    """
    allowed = SpecRules(allow, own, private, reserved)
    allowed.confines.check_base(job.folder, "base")
    allowed.check(job.spec, job.folder)


class SpecRules:
    """Checks the sections of one job."""

    def __init__(
        self,
        allow: AllowSection,
        own: Path | None,
        private: Sequence[Path] = (),
        reserved: ReservedPaths = NONE_RESERVED,
    ) -> None:
        self._allow = allow
        self.confines = AllowedPaths.of(allow.roots, own, private, reserved)

    def check(self, section: BaseModel, folder: Path, at: str = "") -> None:
        """Raise SpecError where `section` names something that is not allowed; its paths are relative to `folder`."""
        for owner, name, value, path in texts(section, at):
            holds = held(owner, name)
            if holds is None:
                raise SpecError("cannot be set through the service: it has no rule for this key", path)
            self._check(holds, value, folder, path)

    def _check(self, holds: TextKind, value: Any, folder: Path, at: str) -> None:
        match holds:
            case TextKind.NAME:
                for each in [value] if isinstance(value, str) else value:
                    for name in [each] if isinstance(each, str) else each:  # pairs of names
                        check_name(name, at)
            case TextKind.FOLDER:
                self.confines.check_folder(value, folder, at)
            case TextKind.BASE:
                self.confines.check_base(Path(value), at)
            case TextKind.PLACE:
                self.confines.check_place(value, folder, at)
            case TextKind.VERSION:
                if not names_commit(value):
                    self.confines.check_export(value, folder, at)
            case TextKind.PATTERNS:
                for number, pattern in enumerate(value):
                    self.confines.check_pattern(pattern, folder, f"{at}.{number}")
            case TextKind.PIPE_COMMAND:
                check_command(value, self._allow.pipe_commands, at, "allow.pipe_commands")
            case TextKind.EXPORT_COMMAND:
                check_command(value, self._allow.export_commands, at, "allow.export_commands")
            case TextKind.MODEL:
                self._check_model(value, at)
            case TextKind.METRIC:
                metrics = (*METRICS.own, *self._allow.metrics)
                allowed = ", ".join(metrics) or "none"
                for number, name in enumerate(value):
                    if name not in metrics:
                        told = f"{name!r} is not allowed here; allowed: {allowed} (allow.metrics)"
                        raise SpecError(told, f"{at}.{number}")
            case TextKind.KAFKA_OPTIONS:
                self._check_kafka(value, folder, at)
            case TextKind.REGISTRY:
                if value not in self._allow.registries:
                    allowed = ", ".join(self._allow.registries) or "none"
                    raise SpecError(f"{value!r} is not allowed here; allowed: {allowed} (allow.registries)", at)
            case TextKind.SECRET:
                self._check_secret(value, folder, at)
            case TextKind.NETWORK:
                if not _is_here(value) and value not in self._allow.interfaces:
                    allowed = ", ".join(self._allow.interfaces) or "none"
                    raise SpecError(
                        f"{value!r} opens a port to other machines, and is not allowed here; allowed: {allowed} "
                        "(allow.interfaces)",
                        at,
                    )
            case TextKind.RAY_CLUSTER:
                if value not in self._allow.ray_addresses:
                    allowed = ", ".join(self._allow.ray_addresses) or "none"
                    raise SpecError(f"{value!r} is not allowed here; allowed: {allowed} (allow.ray_addresses)", at)
            case TextKind.MODEL_SETTINGS | TextKind.SPEC | TextKind.VALUE:
                pass
            case _:
                assert_never(holds)

    def _check_model(self, name: str, at: str) -> None:
        models = tuple(MODELS.own) if self._allow.models is None else self._allow.models
        if name not in models:
            at = at.removesuffix("_path")
            raise SpecError(f"{name!r} is not allowed here; allowed: {', '.join(models)} (allow.models)", at)

    def _check_kafka(self, options: Mapping[str, Any], folder: Path, at: str) -> None:
        for name, value in options.items():
            if name in FILE_OPTIONS and isinstance(value, str):
                self.confines.check_folder(value, folder, f"{at}.{name}")
            elif name not in KAFKA_TEXTS and (name in SECRET_KEYS or any(isinstance(t, str) for t in _leaves(value))):
                raise SpecError("cannot be set through the service", f"{at}.{name}")
            elif is_reference(value):
                self._check_reference(value, folder, f"{at}.{name}")
        brokers = self._allow.bootstrap_servers
        mechanism = options.get("sasl_mechanism")
        if brokers is None and mechanism is not None and mechanism not in OWN_CREDENTIALS:
            message = f"{mechanism!r} would send the service's own credentials to any broker; list the brokers that may"
            raise SpecError(f"{message} have them in allow.bootstrap_servers", f"{at}.sasl_mechanism")
        # Without them a prediction uses the brokers of its job; a source without any is refused elsewhere.
        if "bootstrap_servers" in options:
            self._check_brokers(options, f"{at}.bootstrap_servers")

    def _check_brokers(self, options: Mapping[str, Any], at: str) -> None:
        brokers = self._allow.bootstrap_servers
        for server in servers_of(options):
            if brokers is not None and server not in brokers:
                message = f"{server!r} is not allowed here; allowed: {', '.join(brokers)} (allow.bootstrap_servers)"
                raise SpecError(message, at)

    def _check_reference(self, reference: Mapping[str, str], folder: Path, at: str) -> None:
        """A secret of the service's machine: it must be in the owner's list, and so must the brokers that get it."""
        name = self._check_secret(reference, folder, at)
        if self._allow.bootstrap_servers is None:
            message = f"{name!r} would be sent to any broker; list the brokers that may have it in"
            raise SpecError(f"{message} allow.bootstrap_servers", at)

    def _check_secret(self, reference: Mapping[str, str], folder: Path, at: str) -> str:
        """The name of a secret of the service's machine. Raises SpecError unless the owner's list has it."""
        ((kind, name),) = reference.items()
        if kind == "env":
            known, key = self._allow.secret_env, "allow.secret_env"
        else:
            name, known, key = str(folder / name), self._allow.secret_files, "allow.secret_files"
        if name not in known:
            raise SpecError(f"{name!r} is not allowed here; allowed: {', '.join(known) or 'none'} ({key})", at)
        return name


def held(owner: type[BaseModel], name: str) -> TextKind | None:
    """The kind of text in key `name` of section `owner`; None where no section says it."""
    said = (vars(base).get("holds", {}) for base in owner.__mro__)
    return next((holds[name] for holds in said if name in holds), None)


def texts(section: BaseModel, at: str = "") -> Iterator[tuple[type[BaseModel], str, Any, str]]:
    """Every key below `section` that is set and holds free text: section, key, value, path.

    Names in mappings of sections are checked on the way. Raises SpecError.
    """
    for name in type(section).model_fields:
        value, path = getattr(section, name), f"{at}.{name}" if at else name
        for inner, below in _sections(value, path):
            yield from texts(inner, below)
        if value not in (None, ()) and declares_text(type(section), name):
            yield type(section), name, value, path


def declares_text(owner: type[BaseModel], name: str) -> bool:
    """Whether the key `name` of the section `owner` can hold free text."""
    return holds_text(owner.model_fields[name].annotation)


def holds_text(annotation: Any) -> bool:
    """Whether a value of this type can hold free text of a user. Names in mappings of sections do not count."""
    if annotation in (Any, object, str, bytes) or (isinstance(annotation, type) and issubclass(annotation, Path)):
        return True
    if get_origin(annotation) is Literal or isinstance(annotation, type):
        return False
    inner = get_args(annotation)
    if isinstance(get_origin(annotation), type) and issubclass(get_origin(annotation), Mapping):
        inner = inner[1:]
    return any(holds_text(part) for part in inner)


def check_name(name: str, at: str) -> None:
    """Raise SpecError for a name that is more than a name, as it may become that of a file."""
    if name in (".", "..") or len(name) > MAX_NAME or NAME.fullmatch(name) is None:
        message = (
            f"{name[:MAX_NAME]!r} is not a name: at most {MAX_NAME} characters, no '/', '\\' or control characters"
        )
        raise SpecError(message, at)


def check_command(words: Sequence[str], allowed: Sequence[Sequence[str]], at: str, where: str) -> None:
    """Raise SpecError unless `words` is one of the commands `allowed`, word for word; the error lists them."""
    for command in allowed:
        if tuple(words) == tuple(command):
            return
        if command[-1] == ANY_MORE and tuple(words[: len(command) - 1]) == tuple(command[:-1]):
            return
    known = ", ".join(" ".join(command) for command in allowed) or "none"
    raise SpecError(f"{' '.join(words)[:200]!r} is not allowed here; allowed: {known} ({where})", at)


def _sections(value: Any, at: str) -> Iterator[tuple[BaseModel, str]]:
    """The sections in `value`: itself, or those in a list or mapping of them."""
    if isinstance(value, BaseModel):
        yield value, at
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _sections(part, f"{at}.{number}")
    elif isinstance(value, Mapping):
        for name, part in value.items():
            for inner, below in _sections(part, f"{at}.{name}"):
                check_name(name, at)
                yield inner, below


def _leaves(value: Any) -> Iterator[Any]:
    """The plain values in nested lists and mappings; sections are skipped."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    elif not isinstance(value, BaseModel):
        yield value


def _is_here(network: str) -> bool:
    """Whether an interface, or an address HOST:PORT, is of this machine alone."""
    try:
        return is_loopback(parse_address(network)[0])
    except ValueError:
        return network == LOOPBACK_INTERFACE
