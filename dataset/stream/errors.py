"""Errors of this package.

BadInput (headrace.errors)
+-- PipeFailed          a pipe command failed on a segment `pipe.tries` times
+-- BadEvent            an event is rejected, and `on_bad_event` is "fail"
+-- TooManyBadEvents    more than `max_bad_fraction` of the stream is rejected
+-- SourceGap           a position is no longer retained, or is beyond the end
Unavailable (headrace.errors)
+-- SourceUnavailable   broker or topic does not answer within the deadline
"""

from headrace.errors import BadInput, Unavailable


class PipeFailed(BadInput):
    """A pipe command failed on a segment. The message names command, segment and failure."""


class BadEvent(BadInput):
    """An event is rejected, and the job is set to stop then."""


class TooManyBadEvents(BadInput):
    """More of the stream is rejected than `max_bad_fraction` allows."""


class SourceGap(BadInput):
    """A requested position no longer exists, or never existed."""


class SourceUnavailable(Unavailable):
    """The source does not answer now; a later call may succeed."""
