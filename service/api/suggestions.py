"""/v1/jobs/{job}/suggest: what the slots of a job are worth on its stream, and features that would add to them.

The work is in service.planning.job_features, in a process of its own.
"""

import time
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from headrace import documents
from headrace.deadline import Deadline
from headrace.private_folder import private_folder
from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute
from headrace.service.api.forms import Form, FormField, Group, readable
from headrace.service.api.schemas import RequestBody, shown_by
from headrace.service.cluster.child import Spawner
from headrace.service.cluster.side_process import run_beside
from headrace.service.jobs.background import in_background
from headrace.service.jobs.operation_queue import Operation
from headrace.service.spec.side_config import RESULT, config_beside

router = APIRouter(tags=["jobs"], route_class=AuthorizedRoute)

SUGGEST_S = 1800.0
"""Longest time for one measurement."""
LOOK_S = 0.1
MODULE = "headrace.service.planning.job_features"
"""The process; a service that is not asked loads none of it."""


class SuggestRequest(RequestBody):
    """The events on which a job's slots are measured."""

    model_config = shown_by({"events": 50_000, "newest": True})

    events: int = Field(default=20_000, ge=1_000, le=1_000_000)
    newest: bool = False
    """The last events of the stream, in place of the first ones."""


@action(
    router,
    "/v1/jobs/{job}/suggest",
    id="suggestFeatures",
    summary="Measure slots and propose features",
    form=Form(
        Group.SETTINGS,
        "Suggest features",
        "A process reads events of the job's stream beside the job, and measures which crosses, counters and histories "
        "would pay, which slots do not, and rules of admission. Nothing is changed. It takes minutes.",
        readable,
        (FormField("events", "Events to read"), FormField("newest", "The newest events, not the first ones")),
    ),
)
def suggest_features(call: ActionCall, asked: SuggestRequest | None = None) -> Operation:
    """Measure on a job's stream which crosses, counters and histories pay, which slots do not, and admission.

    A process on the service's machine reads the events beside the job, at low priority; the job may run, and nothing is
    changed. The result has what each costs or saves in rows, as `headrace suggest --json` prints it.
    """
    asked, job, name, host = asked or SuggestRequest(), call.loaded, call.name, call.host
    in_background(lambda: host.check_allowed(name))

    def work(deadline: Deadline) -> Any:
        host.check_allowed(name)  # again: it may have waited
        with private_folder("suggest") as private:

            def look() -> None:
                deadline.check("measuring the job's slots; ask for fewer events")
                time.sleep(LOOK_S)

            found = private / "found"
            more = asked.model_dump()
            run_beside(MODULE, lambda to: config_beside(job, to, **more), found, private, job, Spawner(), look)
            return documents.read_object(found / RESULT)

    return call.start("suggest", "measuring slots on the job's stream", SUGGEST_S, work)
