"""The calls of a join to one shard: events and answers in as many messages as their largest size allows."""

from collections.abc import Sequence

from headrace.deadline import Deadline
from headrace.pserver.client.connection import ShardConnection
from headrace.pserver.proto import shard_pb2 as pb
from headrace.pserver.protocol import join_messages
from headrace.pserver.protocol.join_clock import TimeSpans
from headrace.pserver.protocol.joins import JoinAnswers, JoinEvents


def send_events(
    connection: ShardConnection, caller: pb.Caller, events: JoinEvents, max_bytes: int, deadline: Deadline
) -> JoinAnswers:
    """Send a rank's events of this shard; what they release."""
    parts = join_messages.cut(events, max_bytes)
    requests = [join_messages.request_of(caller, part, number, len(parts)) for number, part in enumerate(parts)]
    replies: Sequence[pb.JoinReply] = [connection.call("Join", each, pb.JoinReply, deadline) for each in requests][-1:]
    for number in range(1, replies[0].num_answers):
        request = pb.JoinRequest(caller=caller, pass_number=events.pass_number, answer=number)
        replies = [*replies, connection.call("Join", request, pb.JoinReply, deadline)]
    return join_messages.answers_from(replies)


def send_times(
    connection: ShardConnection,
    caller: pb.Caller,
    pass_number: int,
    spans: TimeSpans,
    max_ahead_s: float,
    deadline: Deadline,
) -> float:
    """Send the event times of a rank to the shard that has the clock; the latest one that is not too far ahead."""
    request = join_messages.clock_request_of(caller, pass_number, spans, max_ahead_s)
    return connection.call("JoinClock", request, pb.JoinClockReply, deadline).bound_s
