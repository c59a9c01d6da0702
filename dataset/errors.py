"""Errors of this package.

BadInput (millrace.errors)
+-- PipeFailed          a pipe command broke its promise on a segment; tried `pipe.tries` times
+-- BadEvent            an event is bad, and `on_bad_event` is "fail"
+-- TooManyBadEvents    more than `max_bad_fraction` of the stream was rejected
+-- SourceGap           a position is no longer retained, or lies beyond the end
Unavailable (millrace.errors)
+-- SourceUnavailable   broker or topic does not answer within the deadline
"""

from millrace.errors import BadInput, Unavailable


class PipeFailed(BadInput):
    """A pipe command failed on a segment: names command, segment and what it did."""


class BadEvent(BadInput):
    """An event that gives no valid sample, in a job that is told to stop at one."""


class TooManyBadEvents(BadInput):
    """More of the stream was rejected than `max_bad_fraction` allows."""


class SourceGap(BadInput):
    """A position asked for is no longer there, or was never there."""


class SourceUnavailable(Unavailable):
    """The source does not answer; it may later."""
