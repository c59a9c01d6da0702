"""Proposes a job file from a sample of events."""

import os
from pathlib import Path

from headrace.errors import BadInput
from headrace.service.proposals.event_sample import EventSample
from headrace.service.proposals.field_facts import observe_events
from headrace.service.proposals.field_roles import decide
from headrace.service.proposals.job_text import JobProposal, write_job
from headrace.service.proposals.slot_proposals import propose_slots


def infer_job(sample: EventSample, folder: Path) -> JobProposal:
    """The proposed job file, whose relative paths start at `folder`. Raises BadInput for a file without an event."""
    facts = observe_events(iter(sample))
    if not facts.num_events:
        bad = f"; {sample.num_bad:,} lines are none: {'; '.join(sample.bad_lines)}" if sample.num_bad else ""
        raise BadInput(f"{sample.path} has no event: no line with a JSON object{bad}")
    roles = decide(facts)
    slots = propose_slots(roles, facts.fields, facts.num_events)
    return write_job(os.path.relpath(sample.path, folder), sample, facts, roles, slots)
