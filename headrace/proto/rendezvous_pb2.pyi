from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Member(_message.Message):
    __slots__ = ("worker", "generation", "incarnation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    generation: int
    incarnation: str
    def __init__(self, worker: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "kind")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NEVER: _ClassVar[Refusal.Kind]
        LATER: _ClassVar[Refusal.Kind]
        WRONG: _ClassVar[Refusal.Kind]
    NEVER: Refusal.Kind
    LATER: Refusal.Kind
    WRONG: Refusal.Kind
    REASON_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    reason: str
    kind: Refusal.Kind
    def __init__(self, reason: _Optional[str] = ..., kind: _Optional[_Union[Refusal.Kind, str]] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("member", "collectives", "inputs")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    collectives: str
    inputs: _containers.ScalarMap[str, str]
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., collectives: _Optional[str] = ..., inputs: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("refusal", "complete", "collectives")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    complete: bool
    collectives: str
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., complete: _Optional[bool] = ..., collectives: _Optional[str] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("member", "address")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    address: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class FindRequest(_message.Message):
    __slots__ = ("member", "worker")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    member: Member
    worker: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., worker: _Optional[str] = ...) -> None: ...

class FindReply(_message.Message):
    __slots__ = ("refusal", "address", "times")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    address: str
    times: int
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., address: _Optional[str] = ..., times: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("member", "signing_request")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    member: Member
    signing_request: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., signing_request: _Optional[str] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("refusal", "certificate")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    certificate: str
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., certificate: _Optional[str] = ...) -> None: ...

class Agent(_message.Message):
    __slots__ = ("id", "machine", "role", "rank", "world", "local_rank", "cores", "last")
    ID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    id: str
    machine: str
    role: str
    rank: int
    world: int
    local_rank: int
    cores: int
    last: str
    def __init__(self, id: _Optional[str] = ..., machine: _Optional[str] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., world: _Optional[int] = ..., local_rank: _Optional[int] = ..., cores: _Optional[int] = ..., last: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("agent", "leaves", "signing_request")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    leaves: bool
    signing_request: str
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ..., leaves: _Optional[bool] = ..., signing_request: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("refusal", "node_timeout_s", "pause_s", "waits", "assignment", "end", "secret")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NODE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    node_timeout_s: float
    pause_s: float
    waits: str
    assignment: Assignment
    end: End
    secret: str
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., node_timeout_s: _Optional[float] = ..., pause_s: _Optional[float] = ..., waits: _Optional[str] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("worker", "generation", "command", "is_module", "folder", "config_json", "authority", "certificate")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    IS_MODULE_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    generation: int
    command: _containers.RepeatedScalarFieldContainer[str]
    is_module: bool
    folder: str
    config_json: bytes
    authority: str
    certificate: str
    def __init__(self, worker: _Optional[str] = ..., generation: _Optional[int] = ..., command: _Optional[_Iterable[str]] = ..., is_module: _Optional[bool] = ..., folder: _Optional[str] = ..., config_json: _Optional[bytes] = ..., authority: _Optional[str] = ..., certificate: _Optional[str] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("agent", "worker", "generation", "starting", "cannot_start", "lines", "exit_code", "over")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    CANNOT_START_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    agent: str
    worker: str
    generation: int
    starting: bool
    cannot_start: str
    lines: _containers.RepeatedScalarFieldContainer[str]
    exit_code: int
    over: bool
    def __init__(self, agent: _Optional[str] = ..., worker: _Optional[str] = ..., generation: _Optional[int] = ..., starting: _Optional[bool] = ..., cannot_start: _Optional[str] = ..., lines: _Optional[_Iterable[str]] = ..., exit_code: _Optional[int] = ..., over: _Optional[bool] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("refusal", "order")
    class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        GO_ON: _ClassVar[ReportReply.Order]
        TERMINATE: _ClassVar[ReportReply.Order]
        KILL: _ClassVar[ReportReply.Order]
    GO_ON: ReportReply.Order
    TERMINATE: ReportReply.Order
    KILL: ReportReply.Order
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    order: ReportReply.Order
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., order: _Optional[_Union[ReportReply.Order, str]] = ...) -> None: ...

class FeedRequest(_message.Message):
    __slots__ = ("signing_request",)
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    signing_request: str
    def __init__(self, signing_request: _Optional[str] = ...) -> None: ...

class FeedReply(_message.Message):
    __slots__ = ("refusal", "answer_json")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ANSWER_JSON_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    answer_json: bytes
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., answer_json: _Optional[bytes] = ...) -> None: ...
