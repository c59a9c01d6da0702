"""Errors of the shards.

PserverError
+-- ShardUnavailable   no answer; the same call may succeed later              exit code 75
+-- StepTimedOut       a rank waited for others longer than its deadline       exit code 75
+-- StaleGeneration    the caller belongs to workers that were replaced        exit code 75
+-- InvalidShardCall   a bug or a mismatch of versions; never retried
|   +-- MessageTooLarge  a step does not fit into one message
+-- StoreFailed        a disk is full or fails; the same call may succeed later
+-- PartsUnavailable   the object store with parts of commits does not answer  exit code 75
+-- StoreDamaged       a row store or commit differs from what was written     exit code 75
+-- OutOfMemory        rows that wait for a commit fill the bound on memory
"""

from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable


class PserverError(HeadraceError):
    """An error at a shard or on the way to it."""


class ShardUnavailable(PserverError, Unavailable):
    """A shard does not answer now."""

    def __init__(self, shard: str, attempts: int, detail: str) -> None:
        super().__init__(f"{shard} did not answer in {attempts} attempts: {detail}; is its process alive?")
        self.shard, self.attempts, self.detail = shard, attempts, detail


class StepTimedOut(PserverError, DeadlineExceeded):
    """A call timed out, most likely because another rank is late or has ended."""


class StaleGeneration(PserverError):
    """The job's workers were restarted, and the caller or the shard belongs to the old ones."""

    exit_code = 75


class InvalidShardCall(PserverError):
    """The shard can never do what was asked."""


class MessageTooLarge(InvalidShardCall):
    """One step needs a message above the bound."""

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"{peer}: {detail}; lower train.batch_size or use more shards")


class StoreFailed(PserverError):
    """A write to the row store did not happen, since the disk is full or fails. It may be repeated."""


class PartsUnavailable(PserverError, Unavailable):
    """The object store that holds parts of commits does not answer."""


class StoreDamaged(PserverError):
    """A row store or a commit differs from what was written, or has a newer format.

    A restart reads whole commits before it chooses one, and may find an intact one.
    """

    exit_code = 75


class OutOfMemory(PserverError):
    """Rows that wait for a commit fill `tables.<t>.memory`, and no commit came in time."""
