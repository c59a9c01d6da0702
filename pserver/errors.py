"""Errors of the shards.

PserverError
+-- ShardUnavailable   no answer; the same call may succeed later               exit code 75
+-- StepTimedOut       a rank waited for others longer than its deadline        exit code 75
+-- StaleGeneration    the caller belongs to workers that were replaced         exit code 75
+-- BadRequest         a bug or a mismatch of versions; never retried
|   +-- MessageTooLarge  a step does not fit into one message
+-- StoreFailed        a disk is full or fails; the same call may succeed later
+-- StoreDamaged       what a row store or a commit holds is not what was written  exit code 75
+-- OutOfMemory        rows that wait for a commit fill the bound on memory
"""

from millrace.errors import DeadlineExceeded, MillraceError, Unavailable


class PserverError(MillraceError):
    """Something went wrong at a shard or on the way to it."""


class ShardUnavailable(PserverError, Unavailable):
    """A shard does not answer now."""

    def __init__(self, shard: str, attempts: int, detail: str) -> None:
        super().__init__(f"{shard} did not answer in {attempts} attempts: {detail}; is its process alive?")
        self.shard, self.attempts = shard, attempts


class StepTimedOut(PserverError, DeadlineExceeded):
    """The time for a call is used up, most likely because another rank is late or gone."""


class StaleGeneration(PserverError):
    """The job's workers were started anew and the caller is one of the old ones, or the shard is."""

    exit_code = 75


class BadRequest(PserverError):
    """The shard cannot do what it was asked to, now or later."""


class MessageTooLarge(BadRequest):
    """What one step sends exceeds the bound on messages."""

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"{peer}: {detail}; lower train.batch_size or use more shards")


class StoreFailed(PserverError):
    """A write to the row store did not happen: the disk is full or fails. It may be tried again."""


class StoreDamaged(PserverError):
    """What is read from a row store or a commit is not what was written there, or is of a newer format.

    A restart reads every commit whole before it chooses one, and may find a sound one.
    """

    exit_code = 75


class OutOfMemory(PserverError):
    """Rows that wait for a commit fill `tables.<t>.memory`, and no commit came in time."""
