"""Whether an export of a stream is due at a close, of which kind, on which parent, and why: in words.

Pure. The job's log keeps each decision, so none is made twice; what is known of a stream is trainer.exports.chain's.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.exports.chain import Chain, Kind, Link
from trainer.exports.config import ExportSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What a decision looks at beside settings and chain."""

    time_s: float | None
    """Of the stream's clock, unix seconds; None: not known yet."""
    timeline: str
    arithmetic: str
    """Hash of the fingerprint."""
    shared: Mapping[str, Any]
    """What a delta has in common with its parent: trainer.exports.chain.SHARED."""
    ended: bool = False
    """Whether the stream of events is at its end."""
    wish: Kind | None = None
    """What a person asks for."""
    sweeping: Collection[str] = ()
    """Tables of which rows that a shrink took are still to be removed."""
    parent_gone: bool = False
    """Whether the newest complete export is not there any more."""


@dataclass(frozen=True, slots=True)
class Due:
    """What to export."""

    kind: Kind
    parent: Link | None
    """Of a delta."""
    all: bool
    """Whether delta_threshold is passed over: the export before it failed."""
    why: str


def decide(section: ExportSection, chain: Chain, now: Now) -> Due | None:
    """What is due now, if anything is; what falls due while another one is made, or a table is swept, waits."""
    if chain.flight is not None or set(now.shared["tables"]) & set(now.sweeping):
        return None
    called = _called(section, chain, now)
    if called is None:
        return None
    kind, occasion = called
    if kind == "base":
        return Due("base", None, False, occasion)
    hindrance = hinders(section, chain, now)
    if hindrance:
        return Due("base", None, False, f"{occasion}; a base, for {hindrance}")
    return Due("delta", chain.newest, bool(chain.failed), occasion)


def _called(section: ExportSection, chain: Chain, now: Now) -> tuple[Kind, str] | None:
    """The kind that is called for, and by what."""
    if now.wish is not None:
        return now.wish, "asked for"
    if chain.redo:
        return "base", f"at once, for {chain.failed}"
    something = chain.fresh or bool(chain.failed)
    if something and entered(section.base, chain.last_base_s, chain.begun_s, now.time_s):
        return "base", f"each {_length(section.base)}"
    if something and entered(section.delta, chain.last_s, chain.begun_s, now.time_s):
        return "delta", f"each {_length(section.delta)}"
    if at_end(section, chain, ended=now.ended):
        return usual(section), "the end of the stream"
    return None


def entered(interval_s: float | None, last_s: float | None, begun_s: float | None, now_s: float | None) -> bool:
    """Whether another interval began since the last one that counts, in whole ones since the epoch, UTC.

    Also where a clock that was wrong is set back by more than one: it must not be waited for until it is so late again.
    """
    since_s = begun_s if last_s is None else last_s
    if interval_s is None or since_s is None or now_s is None:
        return False
    if now_s < since_s - interval_s:
        return True
    return math.floor(now_s / interval_s) > math.floor(since_s / interval_s)


def at_end(section: ExportSection, chain: Chain, *, ended: bool) -> bool:
    """Whether the stream's end calls for one more."""
    return ended and section.at_end and (chain.fresh or chain.redo)


def usual(section: ExportSection) -> Kind:
    """The kind of an export for which nothing else decides."""
    return "base" if section.delta is None else "delta"


def hinders(section: ExportSection, chain: Chain, now: Now) -> str:
    """Why the next export cannot be a delta; "" where it can."""
    newest = chain.newest
    if chain.failed_base:
        return f"a base failed ({chain.failed})"
    if newest is None:
        return "it is the stream's first"
    if newest.timeline != now.timeline:
        return f"it is the first of timeline {now.timeline}"
    if chain.forked:
        return "passes that were trained again came out otherwise"
    if newest.arithmetic != now.arithmetic:
        return "libraries or hardware are others"
    if changed := [name for name, value in now.shared.items() if newest.shared.get(name) != value]:
        return f"{' and '.join(changed)} changed"
    if not chain.tracked:
        return f"commits did not keep what changed since {newest.name}"
    if now.parent_gone:
        return f"its parent {newest.name} is gone"
    return ""


def _length(interval_s: float | None) -> str:
    """An interval as a user writes it."""
    assert interval_s is not None, "it was entered"
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if interval_s >= length_s and interval_s % length_s == 0:
            return f"{interval_s / length_s:g}{unit}"
    return f"{interval_s:g}s"
