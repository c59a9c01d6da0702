"""Our errors as status codes of gRPC, and back: one meaning on gRPC and on the data plane."""

import grpc

from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.pserver.errors import (
    InvalidShardCall,
    MessageTooLarge,
    OutOfMemory,
    ShardUnavailable,
    StaleGeneration,
    StepTimedOut,
    StoreDamaged,
    StoreFailed,
)

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: Exception) -> grpc.StatusCode:
    """The status code that tells a caller about an error at a shard."""
    match error:
        case StaleGeneration():
            return grpc.StatusCode.FAILED_PRECONDITION
        case StoreFailed():
            return grpc.StatusCode.ABORTED
        case StoreDamaged():
            return grpc.StatusCode.DATA_LOSS
        case OutOfMemory():
            return grpc.StatusCode.OUT_OF_RANGE
        case MessageTooLarge():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case DeadlineExceeded():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case Unavailable():
            return grpc.StatusCode.UNAVAILABLE
        case HeadraceError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case _:
            return grpc.StatusCode.UNKNOWN


def number_of(code: grpc.StatusCode) -> int:
    """The number of a status code, as the data plane sends it."""
    return int(code.value[0])


def code_of(number: int) -> grpc.StatusCode:
    """The inverse of `number_of`."""
    return _BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)


def error_of_status(code: grpc.StatusCode, details: str, peer: str, attempts: int) -> HeadraceError:
    """Our error for a failed call at `peer`."""
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return ShardUnavailable(peer, attempts, details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            # A shard that could still answer names the ranks it waits for.
            return StepTimedOut(details if "waited" in details else f"{peer} did not answer in time")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return StaleGeneration(details)
        case grpc.StatusCode.ABORTED:
            return StoreFailed(f"{peer}: {details}")
        case grpc.StatusCode.DATA_LOSS:
            return StoreDamaged(f"{peer}: {details}")
        case grpc.StatusCode.OUT_OF_RANGE:
            return OutOfMemory(f"{peer}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return MessageTooLarge(peer, details)
        case _:
            return InvalidShardCall(f"{peer} refused a call: {details} ({code.name})")
