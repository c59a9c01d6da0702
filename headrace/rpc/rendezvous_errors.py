"""Refusals of the rendezvous: as messages, as counts, and as errors of the process that was refused."""

from headrace.errors import DeadlineExceeded, HeadraceError, Refused, SpecError, Unavailable
from headrace.proto import rendezvous_pb2 as pb
from headrace.rpc.refusals import RefusalReason


class NoRoomNow(Refused):
    """There is no place for this process now; there may be one later."""

    exit_code = 75


class OtherGeneration(Refused):
    """A process is of another generation than the one that runs."""


def reason_of(error: HeadraceError) -> RefusalReason:
    """The count for an error of the launcher's side."""
    return RefusalReason.OTHER_GENERATION if isinstance(error, OtherGeneration) else RefusalReason.OTHER_PEER


def refusal_of(error: HeadraceError) -> pb.Refusal:
    """The message for an error of the launcher's side."""
    match error:
        case SpecError():
            kind = pb.Refusal.WRONG
        case Unavailable() | DeadlineExceeded():
            kind = pb.Refusal.LATER
        case _:
            kind = pb.Refusal.NEVER
    return pb.Refusal(reason=str(error), kind=kind)


def error_of_refusal(refusal: pb.Refusal, peer: str) -> HeadraceError:
    """The error for a message: SpecError, NoRoomNow or Refused. `peer` names the callee."""
    text = f"{peer} refused the call: {refusal.reason}"
    match refusal.kind:
        case pb.Refusal.WRONG:
            return SpecError(refusal.reason)
        case pb.Refusal.LATER:
            return NoRoomNow(text)
        case _:
            return Refused(text)
