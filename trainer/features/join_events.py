"""The impressions and clicks of a pass, made from its samples, and the samples that cannot be joined. Pure.

Shapes: B samples of a block, Q those that are events of the join, P impressions among them, N bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.formats.arrow_columns import signs_of_texts
from headrace.dataset.samples.batch import F64, I64, Samples
from headrace.dataset.samples.rejection import Reason, RejectedSample
from headrace.dataset.samples.sample_bytes import encode_samples
from headrace.dataset.spec.join_section import MAX_SAMPLE_BYTES, JoinSection, LearnAt
from headrace.dataset.spec.schema import Schema
from headrace.key_kernels import keys_of
from headrace.lists import offsets_of, pick
from headrace.pserver.protocol.joins import F32, U8, U64, JoinEvents, PassTimes
from headrace.seeds import derive
from headrace.trainer.features.neighbours import numbered

SUGGESTED_STEP_BYTES = 256
"""Sizes that are suggested are multiples of it."""


@dataclass(frozen=True, slots=True)
class PassEvents:
    """The events of a rank's part of a pass, with their numbers."""

    events: JoinEvents
    event_Q: I64
    """Number of the event of the stream, from 0; equal for samples of one event."""


def events_of(
    pass_number: int,
    blocks: Sequence[Samples],
    streams: Sequence[str],
    join: JoinSection,
    schema: Schema,
    bound_s: float,
) -> tuple[PassEvents, list[RejectedSample]]:
    """The impressions and clicks of a rank's part of a pass, in the order of the log; and the samples without a time,
    later than `bound_s`, or too long. `streams`: that of each block."""
    parts, rejected, begin = [_no_events()], list[RejectedSample](), 0
    stream_K, length_K = list[int](), list[int]()
    for number, (block, stream) in enumerate(zip(blocks, streams, strict=True)):
        event_B = begin + numbered(block.event_B)
        begin = int(event_B[-1]) + 1 if len(event_B) else begin
        label_B = np.nan_to_num(block.meta[join.label].astype(np.float32), nan=0.0)
        offset_B1, data_N = encode_samples(block, schema)
        length_B = np.where(label_B == 0, np.diff(offset_B1), 0)
        wrong_B = ~np.isfinite(block.time_s_B) | (block.time_s_B > bound_s) | (length_B > join.max_sample_bytes)
        rejected += _rejected(number, block, length_B, np.flatnonzero(wrong_B), join, bound_s)
        at_Q = np.flatnonzero(~wrong_B)
        _, of_impressions_N = pick(offset_B1, data_N, at_Q[label_B[at_Q] == 0])
        key_Q = join_keys(block.meta[join.key][at_Q])
        if not stream_K or stream_K[-1] != derive(0, stream):
            stream_K, length_K = [*stream_K, derive(0, stream)], [*length_K, 0]
        length_K[-1] += len(at_Q)
        parts.append((key_Q, event_B[at_Q], block.time_s_B[at_Q], label_B[at_Q], length_B[at_Q], of_impressions_N))
    key_Q, event_Q, time_Q, label_Q, length_Q, data_N = (np.concatenate(c) for c in zip(*parts, strict=True))
    offset_Q1 = offsets_of(length_Q)
    holds = join.learn is LearnAt.AT_WINDOW_END
    times = PassTimes(time_Q, np.array(stream_K, np.uint64), np.array(length_K, np.int64))
    given = pass_number, times, key_Q, np.arange(len(key_Q)), time_Q, label_Q, holds, offset_Q1, data_N
    return PassEvents(JoinEvents(*given), event_Q), rejected


def _rejected(
    number: int, block: Samples, length_B: I64, wrong: I64, join: JoinSection, bound_s: float
) -> Iterator[RejectedSample]:
    """The reason of each wrong sample of a block."""
    for b in wrong.tolist():
        event, at_s = int(block.event_B[b]), float(block.time_s_B[b])
        if not np.isfinite(at_s):
            yield RejectedSample(number, event, Reason.NO_TIME)
        elif at_s > bound_s:
            detail = f"its time is {at_s:.3f}, and the latest possible one in this pass {bound_s:.3f}"
            yield RejectedSample(number, event, Reason.TOO_FAR_AHEAD, detail)
        else:
            detail = too_long_text(int(length_B[b]), int(length_B.max()), join.max_sample_bytes)
            yield RejectedSample(number, event, Reason.SAMPLE_TOO_LONG, detail)


def too_long_text(num_bytes: int, longest: int, most: int) -> str:
    """The words for a sample that is too long, with the size that would hold the `longest` one of its block."""
    wanted = -(-longest // SUGGESTED_STEP_BYTES) * SUGGESTED_STEP_BYTES
    remedy = f"set join.max_sample_bytes = {wanted}"
    if wanted > MAX_SAMPLE_BYTES:
        remedy = f"at most {MAX_SAMPLE_BYTES} may be set: emit fewer or shorter values (max_len of a slot)"
    return f"its sample has {num_bytes} bytes, and {most} are set; {remedy}"


def join_keys(value_Q: NDArray[np.generic]) -> U64:
    """(Q,) keys of rows of whole numbers or texts."""
    if value_Q.dtype == object:
        sign_Q = signs_of_texts(pa.array([str(value) for value in value_Q], pa.utf8()))
    else:
        sign_Q = np.ascontiguousarray(value_Q.astype(np.uint64))
    key_Q = np.empty(len(sign_Q), np.uint64)
    keys_of(sign_Q, 0, key_Q)
    return key_Q


def _no_events() -> tuple[U64, I64, F64, F32, I64, U8]:
    no_numbers = np.empty(0, np.int64)
    return np.empty(0, np.uint64), no_numbers, np.empty(0), np.empty(0, np.float32), no_numbers, np.empty(0, np.uint8)
