"""The kinds of text that a key of a job file can hold; service.auth.spec_rules checks each for specs over the API."""

from enum import Enum, auto


class TextKind(Enum):
    """Kinds of text that a key can hold."""

    NAME = auto()
    """A name. Some become names of folders, as a table's does."""
    FOLDER = auto()
    BASE = auto()
    """A folder where relative paths start. It gives no access to what lies below it."""
    PLACE = auto()
    """A folder, or the address of one."""
    VERSION = auto()
    """A commit of the job, or the address of an export."""
    PATTERNS = auto()
    PIPE_COMMAND = auto()
    EXPORT_COMMAND = auto()
    MODEL = auto()
    METRIC = auto()
    VALUE = auto()
    """A value or a separator of samples: it names nothing."""
    MODEL_SETTINGS = auto()
    """Settings of a model that is allowed: numbers, or text that the owner accepted with the class."""
    KAFKA_OPTIONS = auto()
    REGISTRY = auto()
    """URL of a schema registry."""
    SECRET = auto()
    """A reference to a secret: credentials for a schema registry, or the key of a mirror."""
    SPEC = auto()
    """A whole spec, which is checked where it is loaded."""
    NETWORK = auto()
    """An interface or an address at which a job listens."""
    RAY_CLUSTER = auto()
