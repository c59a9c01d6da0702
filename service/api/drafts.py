"""/v1/examples, /v1/specs/infer: job files to begin with, for a job that is to be created.

The work is in service.spec.examples and service.planning. The store is left out: the service chooses one.
"""

import re
import tempfile
from pathlib import Path

from fastapi import APIRouter
from pydantic import Field

from headrace.errors import BadInput, SpecError
from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute, authorized
from headrace.service.api.read_places import one_of_few
from headrace.service.api.schemas import RequestBody, ResponseBody, shown_by
from headrace.service.auth.guard import address_of
from headrace.service.auth.limits import share_key
from headrace.service.auth.roles import Role
from headrace.service.planning.toml_text import toml_value
from headrace.service.spec.examples import example_jobs

router = APIRouter(tags=["jobs"], route_class=AuthorizedRoute)

MAX_SAMPLE = 512 << 10
"""Most characters of a sample of events."""
MAX_EVENTS = 20_000
SAMPLE = "events.jsonl"
PATHS_OF_SAMPLE = f'paths = ["{SAMPLE}"]'
"""The line of a proposal with the path of the sample."""
STORE = re.compile(r"^\[store(?:\.\w+)*\][^\[]*", re.MULTILINE)
"""A section [store] of a job file that Headrace wrote."""


class ExampleJob(ResponseBody):
    """An example that comes with Headrace."""

    name: str
    title: str
    toml: str
    """Its job file, without the store."""
    base: str
    """The folder where its relative paths start. The service must allow it, and its commands."""


class ExampleJobs(ResponseBody):
    """The examples that come with Headrace."""

    items: list[ExampleJob]


class InferSpec(RequestBody):
    """A sample of events."""

    model_config = shown_by({"events": '{"user": "u1", "item": "i7", "click": 1}', "paths": "/data/*.jsonl"})

    events: str = Field(min_length=1, max_length=MAX_SAMPLE)
    """JSON objects, one a line."""
    paths: str = Field(default=SAMPLE, min_length=1, max_length=1000)
    """Where the job will find its events: the pattern of the files, for the source of the job file."""


class InferredSpec(ResponseBody):
    """A proposed job file. It is a guess, for a person to check."""

    toml: str
    """With comments that say why."""
    events: int
    """Events of the sample."""
    bad_lines: list[str]
    """The first lines that are no event."""
    missing: list[str]
    """Parts that a person must fill in; empty: the file loads as it is."""


@router.get("/v1/examples", **authorized(Role.ADMIN), operation_id="listExamples", summary="List the example jobs")
def list_examples() -> ExampleJobs:
    """The jobs that come with Headrace, to create one like them."""
    found = example_jobs()
    return ExampleJobs(items=[
        ExampleJob(name=each.name, title=each.title, toml=without_store(each.toml), base=str(each.folder))
        for each in found
    ])  # fmt: skip


@action(
    router,
    "/v1/specs/infer",
    id="inferSpec",
    summary="Propose a job file for events",
    role=Role.ADMIN,
    audited=("paths",),  # not the events
)
def infer_spec(call: ActionCall, asked: InferSpec) -> InferredSpec:
    """Propose slots, label, time and source for a sample of events, as `headrace spec infer` does; it measures none."""
    from headrace.service.planning.event_sample import EventSample  # a service that is not asked loads none of it
    from headrace.service.planning.job_text import infer_job

    with (
        one_of_few(share_key(call.caller, address_of(call.request))),
        tempfile.TemporaryDirectory(prefix="headrace-sample-") as folder,
    ):
        path = Path(folder) / SAMPLE
        path.write_text(asked.events, encoding="utf-8", errors="replace")
        sample = EventSample(path, MAX_EVENTS)
        try:
            proposal = infer_job(sample, path.parent)
        except BadInput as error:
            raise SpecError(str(error).replace(str(path), "the sample"), "events") from None
    return InferredSpec(
        toml=without_store(proposal.text).replace(PATHS_OF_SAMPLE, f"paths = [{toml_value(asked.paths)}]", 1),
        events=sample.num_events,
        bad_lines=sample.bad_lines,
        missing=list(proposal.missing),
    )


def without_store(toml: str) -> str:
    """A job file that Headrace wrote, without its store."""
    return STORE.sub("", toml).rstrip() + "\n"
