"""Retrieves the items of many users, from a request to its _DONE: `headrace retrieve`.

An export is searched as it is. A commit of the job is exported into a scratch folder first: its items are then those of
an export of that version. trainer.predict.batch_retrieval makes the parts. A rerun of the same request continues.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, SpecError
from headrace.private_folder import private_folder
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.predict.prediction import FORMAT, claim_output
from headrace.service.predict.versions import own_export, version_of
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import VERSION
from headrace.trainer.exports.exporter import export as make_export
from headrace.trainer.exports.reader import ReadableExport, open_export
from headrace.trainer.predict.batch_retrieval import (
    BatchRetrieval,
    ItemSearcher,
    UsersFile,
    fingerprint_of_users,
    plan_segments,
    retrieve_parts,
)
from headrace.trainer.predict.output_files import PredictionOutput, part_name
from headrace.trainer.predict.prediction_plan import OutputTaken, PredictionPlan, names_commit
from headrace.trainer.predict.staged_model import request_of_commit

Progress = Callable[[float | None, str], None]


class NoItems(HeadraceError):
    """A version whose items cannot be searched."""


def retrieve(job: LoadedJob, request: BatchRetrieval, progress: Progress, check: Callable[[], None]) -> dict[str, Any]:
    """Carry out `request`; its manifest. `check` raises where the work is to end.

    1. Claim the output. 2. Open the version. 3. Fix the plan. 4. Make the missing parts. 5. Manifest, then _DONE.
    Raises SpecError, OutputTaken, ExportUnusable, UsersRefused. Finished parts stay.
    """
    if job.spec.retrieval is None:
        raise SpecError("the job has no section [retrieval]: it names the items", "retrieval")
    job = with_store_defaults(job)
    progress(None, "reading the users")
    files = [UsersFile.of(path) for path in request.users]
    fingerprint = fingerprint_of_users(files, request)
    with ExitStack() as held:
        mine = held.enter_context(private_folder("retrieval"))
        output = PredictionOutput(request.output, mine / "output")
        done = claim_output(output, fingerprint, held)  # 1
        if done is not None:
            progress(1.0, f"{output.place.address} is done already")
            return done
        before = PredictionPlan.read(output.place)
        progress(None, "opening the items")
        version = held.enter_context(_opened(job, request.version, None if before is None else before.version, mine))
        searcher = ItemSearcher(version.export)  # 2
        plan = before or PredictionPlan(fingerprint, version.description, plan_segments(files, request.segment_users))
        plan.write(output.place)
        if PredictionPlan.read(output.place) != plan:  # 3
            raise OutputTaken(f"another retrieval into {output.place.address} has begun meanwhile; run it again")
        total, made = len(plan.segments), output.num_finished()

        def on_part() -> None:
            nonlocal made
            made += 1
            progress(made / total, f"{made} of {total} parts")

        retrieve_parts(output, plan.segments, searcher, request, on_part, check)  # 4
        output.end(_manifest(output, plan, request))  # 5
        progress(1.0, f"{total} parts")
        return output.manifest() or {}


@dataclass(frozen=True, slots=True)
class _OpenedVersion:
    export: ReadableExport
    description: Mapping[str, Any]
    """For people and for a rerun; equal in every run."""


@contextmanager
def _opened(job: LoadedJob, text: str, before: Mapping[str, Any] | None, scratch: Path) -> Iterator[_OpenedVersion]:
    """The export that `text` names, or one of the commit that it names. Raises SpecError, ExportUnusable."""
    address = text if before is None or "export" not in before else str(before["export"])
    if names_commit(address) and VERSION.fullmatch(address) and before is None:
        address = own_export(job, address) or address
    if not names_commit(address):
        found = open_export(address, scratch / "fetched")
        facts = {name: found.manifest[name] for name in ("job", "timeline", "version", "kind", "name")}
        told = {"export": found.place.address, **facts}
        if before is not None and dict(before) != told:
            raise SpecError(f"{address} is another export than the one of the first parts; begin with a new output")
        yield _OpenedVersion(found, told)
        return
    with version_of(job, text, before, scratch / "unused") as version:
        request = request_of_commit(job.full, job.folder, version.commit, scratch / "made")
        answer = make_export(request, scratch / "rows")
        if answer.outcome != "complete":
            raise NoItems(f"the items of {version.commit.name} cannot be computed: {answer.error}")
        yield _OpenedVersion(open_export(answer.path, scratch / "fetched"), version.description)


def _manifest(output: PredictionOutput, plan: PredictionPlan, request: BatchRetrieval) -> dict[str, Any]:
    """The manifest of the output. Nothing in it depends on when or by whom the output was made."""
    marks = output.marks(range(len(plan.segments)))
    parts = {
        part_name(number): {
            **{"partition": segment.partition, "begin": segment.begin, "end": segment.end},
            **{"users": marks[number].num_events, "sha256": marks[number].sha256, "bytes": marks[number].num_bytes},
        }
        for number, segment in enumerate(plan.segments)
    }
    return {
        "format": FORMAT,
        "fingerprint": plan.fingerprint,
        "version": dict(plan.version),
        "request": request.model_dump(mode="json", include={"users", "version", "k", "segment_users"}),
        "users": sum(mark.num_events for mark in marks.values()),
        "parts": parts,
    }
