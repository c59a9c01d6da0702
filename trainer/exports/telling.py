"""What people are told of a stream's exports: in the chief's status, and in its lines."""

import logging
import time
from typing import Any

from trainer.exports.chain import Chain
from trainer.exports.request import ExportAnswer, ExportRequest

log = logging.getLogger(__name__)


def status_of(chain: Chain, failing: tuple[float, str] | None, now_s: float) -> dict[str, Any]:
    """As JSON-able data. `failing`: since when, on the monotonic clock, and how one fails that is to be tried again."""
    newest, flight, ended = chain.newest, chain.flight, chain.ended
    tried_s = None if failing is None else time.monotonic() - failing[0]
    given_up_s = 0.0 if chain.failed_since_s is None else max(0.0, now_s - chain.failed_since_s)
    return {
        "version": None if newest is None else newest.version,
        "name": None if newest is None else newest.name,
        "kind": None if newest is None else newest.kind,
        "age_s": None if chain.ended_complete_s is None else max(0.0, now_s - chain.ended_complete_s),
        "making": None if flight is None else flight.name,
        "failing": chain.failed or None if failing is None else failing[1],
        "failing_s": given_up_s if tried_s is None else tried_s,
        "failed_gates": list(ended.get("failed_gates", ())),
        "command_error": ended.get("command_error"),
        "last": {key: ended.get(key) for key in ("id", "name", "outcome", "error", "current")} if ended else None,
    }


def tell(request: ExportRequest, answer: ExportAnswer) -> None:
    """How an export ended for good."""
    what = f"export {request.name} of {request.stream}"
    if answer.outcome == "failed":
        log.error("%s failed, and is given up; the next one takes what it lacks: %s", what, answer.error)
        return
    log.info("%s: %d rows, %d deleted, %.1f s; %s", what, answer.rows, answer.tombstones, answer.seconds, answer.path)
    if answer.failed_gates:
        log.warning("%s is not pointed to: %s", what, "; ".join(answer.failed_gates))
