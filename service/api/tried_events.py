"""/v1/jobs/{job}/try: predicts pasted events with a job's newest commit.

The work is in service.predict.event_trials. The answer goes to the caller alone: it is no operation, and is not stored.
"""

from fastapi import APIRouter
from pydantic import Field

from headrace.deadline import Deadline
from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute
from headrace.service.api.read_places import one_of_few
from headrace.service.api.schemas import RequestBody, ResponseBody, shown_by
from headrace.service.auth.guard import address_of
from headrace.service.auth.limits import share_key
from headrace.service.jobs.background import in_background
from headrace.service.predict.event_trials import MAX_TEXT, EventTrials, events_of

router = APIRouter(tags=["jobs"], route_class=AuthorizedRoute)

TRY_S = 25.0
"""Longest time for an answer. The first one waits for a process, and for its imports. Clients wait for 30 s."""


class TryEvents(RequestBody):
    """Events as they come from the job's source."""

    model_config = shown_by({"events": '{"user": "u1", "item": "i7"}'})

    events: str = Field(default="", max_length=MAX_TEXT)
    """One event a line, in the job's own format. Empty: all is made ready, so that the next answer comes at once."""
    example: bool = False
    """Whether the answer has a recent event of the job's stream, too."""


class TriedSlot(ResponseBody):
    """The values of one slot in a sample."""

    name: str
    kind: str
    """"sparse", "dense" or "meta"."""
    values: list[str]
    """The first of them. An id that is the hash of a text of the event is shown as this text."""
    missing: list[str]
    """Those without a row: the job has not learnt them, and predicts with the default row."""
    more: int
    """Values that are not shown."""


class TriedSample(ResponseBody):
    """One sample of the events."""

    event: int
    """The number of its event, from 0."""
    time: float | None
    """Time of the event in unix seconds, or null."""
    predictions: dict[str, float | None]
    """By task."""
    slots: list[TriedSlot]


class TriedRejection(ResponseBody):
    """Events that give no sample."""

    reason: str
    events: int
    first: str
    """The first of them, in words."""


class TriedEvents(ResponseBody):
    """Predictions of pasted events by one version."""

    version: int
    commit: str
    samples: list[TriedSample]
    left_out: int
    """Samples beyond those that are shown."""
    rejected: list[TriedRejection]
    example: str | None
    """If one was asked for: a recent event of the job's stream. Null where that is no line of text, or cannot be read
    within five seconds."""


@action(router, "/v1/jobs/{job}/try", id="tryEvents", summary="Predict pasted events", audited=(), repeatable=False)
def try_events(call: ActionCall, asked: TryEvents) -> TriedEvents:
    """Predict events with the job's newest commit: their samples, features and predictions, and rows that are missing.

    They go through the job's pipe. The job need not run; nothing is learnt or stored. The first answer takes some
    seconds, until a process is ready; that process stays for a few minutes.
    """
    events = events_of(asked.events)
    in_background(lambda: call.host.check_allowed(call.name))
    trials: EventTrials = call.request.app.state.trials
    with one_of_few(share_key(call.caller, address_of(call.request))):
        deadline = Deadline.after(TRY_S)
        found = trials.ask(call.name, call.loaded, events, deadline, example=asked.example)
    return TriedEvents(**{name: found[name] for name in TriedEvents.model_fields})
