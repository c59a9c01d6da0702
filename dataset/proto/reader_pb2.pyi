from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReadRequest(_message.Message):
    __slots__ = ("generation", "rank", "format", "pass_number", "part")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    format: int
    pass_number: int
    part: bytes
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., format: _Optional[int] = ..., pass_number: _Optional[int] = ..., part: _Optional[bytes] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("data", "ends", "failure")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    ends: bool
    failure: bytes
    def __init__(self, data: _Optional[bytes] = ..., ends: _Optional[bool] = ..., failure: _Optional[bytes] = ...) -> None: ...
