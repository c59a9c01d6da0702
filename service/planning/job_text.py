"""The text of a proposed job file, with comments that say what was seen, and what is left for the user to fill in."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import BadInput
from headrace.service.planning.event_sample import EventSample
from headrace.service.planning.field_facts import EventFacts, observe_events
from headrace.service.planning.field_roles import ISO, EventRoles, decide
from headrace.service.planning.slot_proposals import Proposals, SlotProposal, propose_slots

MANY_SLOTS = 32
"""With more sparse slots, whose rows are added up, smaller steps are better."""
FILL_IN = "FILL IN"
"""Begins a comment about something that the user must fill in before the job loads."""
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PLAIN_PATH = re.compile(r"[^*?\[\]{}\x00-\x1f\x7f\\\"]+")
"""A path that is no pattern, and can be written in TOML as it is."""


@dataclass(frozen=True, slots=True)
class JobProposal:
    """A proposed job file."""

    text: str
    """TOML."""
    missing: tuple[str, ...]
    """Parts that the user must fill in; empty: the file loads as it is."""


def write_job(path: str, sample: EventSample, facts: EventFacts, roles: EventRoles, slots: Proposals) -> JobProposal:
    """The job file for the events of the file `path`, a path as the job file will have it."""
    missing = []
    if PLAIN_PATH.fullmatch(path) is None:
        missing.append("sources.events.paths: the name of the file has characters of a pattern")
    if slots.label is None:
        missing.append('a slot with kind = "meta" for the label, and [[tasks]]: no field looks like a label')
    if not any(slot.is_feature for slot in slots.features):
        missing.append("slots for the model: no field looks like one that it can learn from")
    lines = [*_head(path, sample, facts, missing), "", *_source(path, roles), "", *_pipe(roles), ""]
    lines += [*_slots(slots), *_tasks(slots), *_model(slots, roles)]
    return JobProposal("\n".join(lines) + "\n", tuple(missing))


def _head(path: str, sample: EventSample, facts: EventFacts, missing: list[str]) -> Iterator[str]:
    first = "" if sample.reached_end else "the first "
    yield f"# Proposed by headrace spec infer from {first}{facts.num_events:,} events of {json.dumps(path)}."
    yield "# Guessed from names and values: read the comments, and change what is wrong."
    if sample.num_bad:
        yield f"# {sample.num_bad:,} lines are no JSON object; a job rejects them: {'; '.join(sample.bad_lines)}"
    if facts.mappings:
        names = ", ".join(json.dumps(name) for name in sorted(facts.mappings))
        yield f"# Left out, as they have very many fields and so look like mappings of ids: {names}"
    if facts.num_left_out:
        yield f"# {facts.num_left_out:,} values are left out: too deep, of too many fields, or no name for a path"
    for each in missing:
        yield f"# {FILL_IN} {each}"
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.rpartition("/")[2].partition(".")[0])[:64].lstrip("._-")
    yield f"name = {_toml(stem if JOB_NAME.fullmatch(stem) else 'events')}"
    yield "seed = 1"


def _source(path: str, roles: EventRoles) -> Iterator[str]:
    yield "[sources.events]"
    yield 'kind = "files"'
    yield f"paths = [{_toml(path if PLAIN_PATH.fullmatch(path) else 'events.jsonl')}]"
    if roles.time is None:
        yield "# No field looks like the time of the event: days stand still, and windows count passes."
        return
    field, unit, why = roles.time
    of_numbers = "" if unit == ISO else f", unit = {_toml(unit)}"
    yield f"event_time = {{ field = {_toml(field)}{of_numbers} }}  # {why}"


def _pipe(roles: EventRoles) -> Iterator[str]:
    yield "[pipe]"
    yield 'kind = "columns"'
    if roles.explode is not None:
        yield f"explode = {_toml(roles.explode)}  # each of its elements is a sample"


def _slots(slots: Proposals) -> Iterator[str]:
    for slot in slots.features:
        yield from _entry(slot)
    if slots.crosses:
        yield "# What is exploded, crossed with fields of the event: this is what tells the elements of one list apart."
        for slot in slots.crosses:
            yield from _entry(slot)
    for found in (slots.group, slots.label):
        if found is not None:
            yield from _entry(found)


def _entry(slot: SlotProposal) -> Iterator[str]:
    """One entry; one that is not active is a comment."""
    for line in slot.comment.splitlines():
        yield f"# {line}"
    mark = "" if slot.active else "# "
    yield f"{mark}[[slots]]"
    for key, value in slot.keys.items():
        yield f"{mark}{key} = {_toml(value)}"
    yield ""


def _tasks(slots: Proposals) -> Iterator[str]:
    if slots.label is not None:
        yield "[[tasks]]"
        yield 'name = "ctr"'
        yield f"label = {_toml(slots.label.name)}"
        yield ""
    if slots.group is not None:
        yield "[sample]"
        yield f"group = {_toml(slots.group.name)}"
        yield ""


def _model(slots: Proposals, roles: EventRoles) -> Iterator[str]:
    num_sparse = sum(slot.is_feature and slot.keys.get("kind") != "dense" for slot in (*slots.features, *slots.crosses))
    if num_sparse:
        lr, first_order_lr = (0.05, 0.1) if num_sparse <= MANY_SLOTS else (0.02, 0.05)
        yield "[tables.default]"
        yield "dim = 8"
        yield f'optimizer = {{ kind = "adagrad", lr = {lr} }}'
        yield f'first_order_optimizer = {{ kind = "adagrad", lr = {first_order_lr} }}'
        yield ""
    yield from ("[model]", 'name = "deepfm"', "[model.settings]", "hidden = [64, 32]", "")
    yield from ("[train]", "batch_size = 256", "")
    yield from ("[dense]", 'optimizer = { kind = "adam", lr = 0.001 }', "")
    yield from ("[passes]", f"max_events = {2000 if roles.explode else 10000}", "")
    if slots.group is not None or roles.time is not None:
        yield "[metrics]"
        if roles.time is not None:
            yield 'window = "24h"'
        if slots.group is not None:
            yield f"gauc_by = {_toml(slots.group.name)}"
        yield ""
    yield from ("[store]", 'path = "runs"')


def _toml(value: Any) -> str:
    """A value of TOML. Names and paths have no character that JSON and TOML write differently."""
    return json.dumps(value, ensure_ascii=False)


# Proposes a job file from a sample of events.


def infer_job(sample: EventSample, folder: Path) -> JobProposal:
    """The proposed job file, whose relative paths start at `folder`. Raises BadInput for a file without an event."""
    facts = observe_events(iter(sample))
    if not facts.num_events:
        bad = f"; {sample.num_bad:,} lines are none: {'; '.join(sample.bad_lines)}" if sample.num_bad else ""
        raise BadInput(f"{sample.path} has no event: no line with a JSON object{bad}")
    roles = decide(facts)
    slots = propose_slots(roles, facts.fields, facts.num_events)
    return write_job(os.path.relpath(sample.path, folder), sample, facts, roles, slots)
