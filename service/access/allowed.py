"""What a spec that comes from elsewhere may name: commands, models, brokers, folders, as `allow` of the service says.

A section is walked whole. Whatever can hold free text stands in `HOLDS` with what it is; a key that does not is refused
once it is set, so that a new one cannot be forgotten. Sizes are service.access.sizes' business.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal, assert_never, get_args, get_origin

from pydantic import BaseModel

from millrace.errors import SpecError
from millrace.secrecy import SECRET_KEYS, is_reference
from service.access.config import ANY_MORE, AllowSection
from service.access.confines import NONE_RESERVED, Confines, ReservedPaths
from service.spec import LoadedJob
from trainer.models.registry import MODELS
from trainer.predict.plan import names_commit, servers_of

MAX_NAME = 128
NAME = re.compile(r"[^/\\\x00-\x1f\x7f]+")


class Holds(Enum):
    """What the text of a key is."""

    NAME = auto()
    """A name: of a table it is a folder's, too."""
    FOLDER = auto()
    BASE = auto()
    """A folder where relative paths start: what lies below it is not named by it."""
    PLACE = auto()
    """A folder, or the address of one."""
    VERSION = auto()
    """A commit of the job, or the place of an export."""
    PATTERNS = auto()
    PIPE_COMMAND = auto()
    EXPORT_COMMAND = auto()
    MODEL = auto()
    MODEL_SETTINGS = auto()
    """Of models that are allowed: numbers, or what the owner has let in with the class."""
    KAFKA_OPTIONS = auto()
    SPEC = auto()
    """A spec in itself, which whoever loads it has checked."""


HOLDS: Mapping[tuple[str, str], Holds] = {
    ("TrainerJob", "name"): Holds.NAME,
    ("FilesSource", "paths"): Holds.PATTERNS,
    ("FilesSource", "partition_by"): Holds.NAME,
    ("FilesSource", "ready"): Holds.NAME,
    ("KafkaSource", "topics"): Holds.NAME,
    ("KafkaSource", "options"): Holds.KAFKA_OPTIONS,
    ("KafkaSource", "group"): Holds.NAME,
    ("KafkaSource", "start"): Holds.NAME,
    ("KafkaSource", "end"): Holds.NAME,
    ("EventTime", "field"): Holds.NAME,
    ("EventTime", "slot"): Holds.NAME,
    ("PipeSection", "command"): Holds.PIPE_COMMAND,
    ("SlotEntry", "name"): Holds.NAME,
    ("SlotEntry", "names"): Holds.NAME,
    ("SparseSlot", "table"): Holds.NAME,
    ("SparseSlot", "share"): Holds.NAME,
    ("TaskSection", "name"): Holds.NAME,
    ("TaskSection", "label"): Holds.NAME,
    ("TaskSection", "mask"): Holds.NAME,
    ("SampleSection", "group"): Holds.NAME,
    ("SampleSection", "weight"): Holds.NAME,
    ("TableSection", "show"): Holds.NAME,
    ("TableSection", "click"): Holds.NAME,
    ("ModelSection", "name"): Holds.MODEL,
    ("ModelSection", "class_path"): Holds.MODEL,
    ("ModelSection", "settings"): Holds.MODEL_SETTINGS,
    ("MetricsSection", "gauc_by"): Holds.NAME,
    ("MetricsSection", "slices"): Holds.NAME,
    ("StoreSection", "path"): Holds.FOLDER,
    ("StoreSection", "mirror"): Holds.PLACE,
    ("ExportSection", "path"): Holds.PLACE,
    ("ExportSection", "tables"): Holds.NAME,
    ("ExportSection", "command"): Holds.EXPORT_COMMAND,
    ("InputSection", "paths"): Holds.PATTERNS,
    ("KafkaInput", "topic"): Holds.NAME,
    ("KafkaInput", "options"): Holds.KAFKA_OPTIONS,
    ("PredictionRequest", "output"): Holds.FOLDER,
    ("PredictionRequest", "version"): Holds.VERSION,
    ("PredictionRequest", "columns"): Holds.NAME,
    ("PredictionRequest", "outputs"): Holds.NAME,
    ("PredictionRequest", "spec"): Holds.SPEC,
    ("PredictionRequest", "base"): Holds.BASE,
}
"""By section and key; what a section inherits stands under the section that declares it."""
KAFKA_FILES = ("ssl_cafile", "ssl_certfile", "ssl_crlfile", "ssl_keyfile")
KAFKA_TEXTS = (
    "bootstrap_servers client_dns_lookup client_id client_rack isolation_level sasl_mechanism sasl_plain_password "
    "sasl_plain_username security_protocol ssl_ciphers ssl_password"
).split()
"""Options of Kafka that may hold text. Not among them: proxies, which could be any host, and Kerberos' names."""
OWN_CREDENTIALS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
"""Mechanisms by which a spec shows credentials that it brings; others show the service's."""


def check_spec(
    job: LoadedJob,
    allow: AllowSection,
    own: Path | None,
    private: Sequence[Path] = (),
    reserved: ReservedPaths = NONE_RESERVED,
) -> None:
    """Raise SpecError at the first key of `job` that names what is not allowed; `own` is the job's own folder.

    `private`: what no spec may reach, even below an allowed root; `kept`: what other jobs keep. To be asked again when
    workers are started.
    """
    allowed = Allowed(allow, own, private, reserved)
    allowed.confines.check_base(job.folder, "base")
    allowed.check(job.spec, job.folder)


class Allowed:
    """What one job may name."""

    def __init__(
        self,
        allow: AllowSection,
        own: Path | None,
        private: Sequence[Path] = (),
        reserved: ReservedPaths = NONE_RESERVED,
    ) -> None:
        self._allow = allow
        self.confines = Confines.of(allow.roots, own, private, reserved)

    def check(self, section: BaseModel, folder: Path, at: str = "") -> None:
        """Raise SpecError where `section`, whose relative paths start at `folder`, names what is not allowed."""
        for owner, name, value, path in texts(section, at):
            holds = held(owner, name)
            if holds is None:
                raise SpecError("cannot be set through the service: it does not know what this key may hold", path)
            self._check(holds, value, folder, path)

    def _check(self, holds: Holds, value: Any, folder: Path, at: str) -> None:
        match holds:
            case Holds.NAME:
                for name in [value] if isinstance(value, str) else value:
                    check_name(name, at)
            case Holds.FOLDER:
                self.confines.check_folder(value, folder, at)
            case Holds.BASE:
                self.confines.check_base(Path(value), at)
            case Holds.PLACE:
                self.confines.check_place(value, folder, at)
            case Holds.VERSION:
                if not names_commit(value):
                    self.confines.check_export(value, folder, at)
            case Holds.PATTERNS:
                for number, pattern in enumerate(value):
                    self.confines.check_pattern(pattern, folder, f"{at}.{number}")
            case Holds.PIPE_COMMAND:
                check_command(value, self._allow.pipe_commands, at, "allow.pipe_commands")
            case Holds.EXPORT_COMMAND:
                check_command(value, self._allow.export_commands, at, "allow.export_commands")
            case Holds.MODEL:
                self._check_model(value, at)
            case Holds.KAFKA_OPTIONS:
                self._check_kafka(value, folder, at)
            case Holds.MODEL_SETTINGS | Holds.SPEC:
                pass
            case _:
                assert_never(holds)

    def _check_model(self, name: str, at: str) -> None:
        models = tuple(MODELS) if self._allow.models is None else self._allow.models
        if name not in models:
            at = at.removesuffix("_path")
            raise SpecError(f"{name!r} is not allowed here; allowed: {', '.join(models)} (allow.models)", at)

    def _check_kafka(self, options: Mapping[str, Any], folder: Path, at: str) -> None:
        for name, value in options.items():
            if name in KAFKA_FILES and isinstance(value, str):
                self.confines.check_folder(value, folder, f"{at}.{name}")
            elif name not in KAFKA_TEXTS and (name in SECRET_KEYS or any(isinstance(t, str) for t in _leaves(value))):
                raise SpecError("cannot be set through the service", f"{at}.{name}")
            elif is_reference(value):
                self._check_reference(value, folder, f"{at}.{name}")
        brokers = self._allow.bootstrap_servers
        mechanism = options.get("sasl_mechanism")
        if brokers is None and mechanism is not None and mechanism not in OWN_CREDENTIALS:
            told = f"{mechanism!r} would show the service's own credentials to any broker; allow.bootstrap_servers must"
            raise SpecError(f"{told} say to which ones", f"{at}.sasl_mechanism")
        if (
            "bootstrap_servers" in options
        ):  # else a prediction has its job's; without any, a source is refused elsewhere
            self._check_brokers(options, f"{at}.bootstrap_servers")

    def _check_brokers(self, options: Mapping[str, Any], at: str) -> None:
        brokers = self._allow.bootstrap_servers
        for server in servers_of(options):
            if brokers is not None and server not in brokers:
                told = f"{server!r} is not allowed here; allowed: {', '.join(brokers)} (allow.bootstrap_servers)"
                raise SpecError(told, at)

    def _check_reference(self, reference: Mapping[str, str], folder: Path, at: str) -> None:
        """A secret of the service's machine: one that its owner has let in, and for brokers that are named only."""
        ((kind, name),) = reference.items()
        if kind == "env":
            known, key = self._allow.secret_env, "allow.secret_env"
        else:
            name, known, key = str(folder / name), self._allow.secret_files, "allow.secret_files"
        if name not in known:
            raise SpecError(f"{name!r} is not allowed here; allowed: {', '.join(known) or 'none'} ({key})", at)
        if self._allow.bootstrap_servers is None:
            told = f"{name!r} would be shown to any broker; allow.bootstrap_servers must say to which ones"
            raise SpecError(told, at)


def held(owner: type[BaseModel], name: str) -> Holds | None:
    """What the key `name` of the section `owner` holds; None where nobody has said."""
    return next((HOLDS[base.__name__, name] for base in owner.__mro__ if (base.__name__, name) in HOLDS), None)


def texts(section: BaseModel, at: str = "") -> Iterator[tuple[type[BaseModel], str, Any, str]]:
    """Every key below `section` whose value is set and holds free text: section, key, value, path.

    Names of mappings of sections are checked on the way. Raises SpecError.
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
    """Whether a value so declared can hold text that a user makes up; names in mappings of sections are none."""
    if annotation in (Any, object, str, bytes) or (isinstance(annotation, type) and issubclass(annotation, Path)):
        return True
    if get_origin(annotation) is Literal or isinstance(annotation, type):
        return False
    inner = get_args(annotation)
    if isinstance(get_origin(annotation), type) and issubclass(get_origin(annotation), Mapping):
        inner = inner[1:]
    return any(holds_text(part) for part in inner)


def check_name(name: str, at: str) -> None:
    """A name that is nothing but one, as it may become a file's. Raises SpecError."""
    if name in (".", "..") or len(name) > MAX_NAME or NAME.fullmatch(name) is None:
        told = (
            f"{name[:MAX_NAME]!r} is no name: at most {MAX_NAME} characters, without '/', '\\' and control characters"
        )
        raise SpecError(told, at)


def check_command(words: Sequence[str], allowed: Sequence[Sequence[str]], at: str, where: str) -> None:
    """Whether `words` is one of the commands `allowed`, word for word. Raises SpecError naming them."""
    for command in allowed:
        if tuple(words) == tuple(command):
            return
        if command[-1] == ANY_MORE and tuple(words[: len(command) - 1]) == tuple(command[:-1]):
            return
    known = ", ".join(" ".join(command) for command in allowed) or "none"
    raise SpecError(f"{' '.join(words)[:200]!r} is not allowed here; allowed: {known} ({where})", at)


def _sections(value: Any, at: str) -> Iterator[tuple[BaseModel, str]]:
    """Sections in `value`: itself, or those in a list or mapping of them."""
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
    """Plain values in lists and mappings, however deep; sections are not looked into."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    elif not isinstance(value, BaseModel):
        yield value
