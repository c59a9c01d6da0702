"""The text of a proposed job file, with comments that say what was seen, and what is left for the user to fill in."""

import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.dataset.loader.dead_letters import format_example
from headrace.errors import BadInput, SpecError
from headrace.service.planning.event_sample import EventSample
from headrace.service.planning.feature_worth import FeatureWorth, entry_of
from headrace.service.planning.field_facts import EventFacts, observe_events
from headrace.service.planning.field_roles import ISO, EventRoles, decide
from headrace.service.planning.job_features import measure_job
from headrace.service.planning.slot_proposals import Proposals, SlotProposal, propose_slots, with_measured
from headrace.service.planning.toml_text import slot_lines, toml_value
from headrace.service.spec.job import job_of

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
    if not any(slot.is_feature for slot in (*slots.features, *slots.measured)):
        missing.append("slots for the model: no field looks like one that it can learn from")
    lines = [
        *_head(path, sample, facts, missing),
        *_measurement(slots),
        "",
        *_source(path, roles),
        "",
        *_pipe(roles),
        "",
    ]
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
    yield f"name = {toml_value(stem if JOB_NAME.fullmatch(stem) else 'events')}"
    yield "seed = 1"


def _measurement(slots: Proposals) -> Iterator[str]:
    if (found := slots.found) is not None:
        yield f"# Measured on {found.samples:,} samples with a linear model, which predicts each before it learns it."
        yield f"# With the plain slots, the second half has an AUC of {found.auc:.4f}; p is of the log loss."


def _source(path: str, roles: EventRoles) -> Iterator[str]:
    yield "[sources.events]"
    yield 'kind = "files"'
    yield f"paths = [{toml_value(path if PLAIN_PATH.fullmatch(path) else 'events.jsonl')}]"
    if roles.time is None:
        yield "# No field looks like the time of the event: days stand still, and windows count passes."
        return
    field, unit, why = roles.time
    of_numbers = "" if unit == ISO else f", unit = {toml_value(unit)}"
    yield f"event_time = {{ field = {toml_value(field)}{of_numbers} }}  # {why}"


def _pipe(roles: EventRoles) -> Iterator[str]:
    yield "[pipe]"
    yield 'kind = "columns"'
    if roles.explode is not None:
        yield f"explode = {toml_value(roles.explode)}  # each of its elements is a sample"


def _slots(slots: Proposals) -> Iterator[str]:
    for slot in slots.features:
        yield from _entry(slot)
    if slots.crosses:
        yield "# What is exploded, crossed with fields of the event: this is what tells the elements of one list apart."
        for slot in slots.crosses:
            yield from _entry(slot)
    if slots.measured:
        yield "# Features that pay, each on top of those before; then, as comments, some that say the same as these."
        for slot in slots.measured:
            yield from _entry(slot)
    for found in (slots.group, slots.label):
        if found is not None:
            yield from _entry(found)


def _entry(slot: SlotProposal) -> Iterator[str]:
    """One entry; one that is not active is a comment."""
    for line in slot.comment.splitlines():
        yield f"# {line}"
    mark = "" if slot.active else "# "
    yield from (f"{mark}{line}" for line in slot_lines(slot.keys))
    yield ""


def _tasks(slots: Proposals) -> Iterator[str]:
    if slots.label is not None:
        yield "[[tasks]]"
        yield 'name = "ctr"'
        yield f"label = {toml_value(slots.label.name)}"
        yield ""
    if slots.group is not None:
        yield "[sample]"
        yield f"group = {toml_value(slots.group.name)}"
        yield ""


def _model(slots: Proposals, roles: EventRoles) -> Iterator[str]:
    yield from ("[model]", 'name = "deepfm"  # rates, batch size and widths are the defaults', "")
    yield from _sequence_model(slots, roles.explode)
    yield from ("[passes]", f"max_events = {2000 if roles.explode else 10000}", "")
    if slots.group is not None or roles.time is not None:
        yield "[metrics]"
        if roles.time is not None:
            yield 'window = "24h"'
        if slots.group is not None:
            yield f"gauc_by = {toml_value(slots.group.name)}"
        yield ""
    yield from ("[store]", 'path = "runs"')


def _sequence_model(slots: Proposals, explode: str | None) -> Iterator[str]:
    """A model that reads sequences, as a comment; what it remembers is what a sample is about."""
    session = None if slots.found is None else slots.found.session
    known = {slot.name for slot in slots.sparse if slot.keys.get("pooling") is None}
    if session is None or not {*session.of} <= known:
        return
    key, of = session.of
    field = next(str(slot.keys.get("from", of)) for slot in slots.features if slot.name == of)
    if explode is not None and field != explode and not field.startswith(f"{explode}."):
        return
    length_B = np.diff(session.column.start_B1)
    share, median = np.mean(length_B > 0), np.median(length_B[length_B > 0])
    names = {slot.name for slot in (*slots.features, *slots.crosses, *slots.measured)}
    texts = {slot.name for slot in slots.features if slot.keys.get("values") == "string"}
    entry = entry_of(session, names, texts) | {"pooling": "none"}
    yield f'# {share:.0%} of the samples have a "{key}" with earlier clicks, {median:.0f} in the median. A model'
    yield "# of sequences compares each with the item. Try it in place of the one above; headrace compare judges:"
    yield from (f"# {line}" for line in slot_lines({**entry, "name": f"{entry['name']}_sequence"}))
    yield f'# [model]\n# name = "din"\n# [model.settings]\n# target = {toml_value(of)}\n# hidden = [64, 32]'
    yield ""


# Proposes a job file from a sample of events.


def infer_job(sample: EventSample, folder: Path, *, measured: bool = False) -> JobProposal:
    """The proposed job file, whose relative paths start at `folder`. Raises BadInput for a file without an event.

    `measured`: with the features that pay on the sample.
    """
    facts = observe_events(iter(sample))
    if not facts.num_events:
        bad = f"; {sample.num_bad:,} lines are none: {'; '.join(sample.bad_lines)}" if sample.num_bad else ""
        raise BadInput(f"{sample.path} has no event: no line with a JSON object{bad}")
    roles = decide(facts)
    slots = propose_slots(roles, facts.fields, facts.num_events)
    path = os.path.relpath(sample.path, folder)
    proposal = write_job(path, sample, facts, roles, slots)
    if not measured or proposal.missing:
        return proposal
    try:
        found, rejected = _measure(proposal, slots, sample, folder)
        measured_job = write_job(path, sample, facts, roles, with_measured(slots, found))
        return replace(measured_job, text=f"{rejected}{measured_job.text}")
    except (BadInput, SpecError) as error:
        return replace(proposal, text=f"# Nothing is measured: {json.dumps(str(error))}\n{proposal.text}")


def _measure(proposal: JobProposal, slots: Proposals, sample: EventSample, folder: Path) -> tuple[FeatureWorth, str]:
    """Measure its slots on the sample; and a comment, if the job rejects JSON objects. Raises SpecError, BadInput."""
    raw = tomllib.loads(proposal.text)
    raw["slots"] += [dict(slot.keys) for slot, _ in slots.ids]
    found, tally = measure_job(
        job_of(raw, folder),
        sample.num_events + sample.num_bad,
        ids={slot.name: of for slot, of in slots.ids},
        doubted={slot.name for slot in slots.features if slot.made_up},
    )
    rejected = sum(tally.rejected.values())
    if rejected <= sample.num_bad:  # lines that are no JSON object are told of elsewhere
        return found, ""
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(tally.rejected.items()))
    reasons += format_example(tally.rejected, tally.first_of)
    return found, f"# The job rejects {rejected:,} of these {tally.num_events:,} events: {json.dumps(reasons)}\n"
