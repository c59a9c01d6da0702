from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: bytes
    def __init__(self, message: _Optional[bytes] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("status_json", "message")
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status_json: bytes
    message: bytes
    def __init__(self, status_json: _Optional[bytes] = ..., message: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OperateRequest(_message.Message):
    __slots__ = ("request_json",)
    REQUEST_JSON_FIELD_NUMBER: _ClassVar[int]
    request_json: bytes
    def __init__(self, request_json: _Optional[bytes] = ...) -> None: ...

class OperateReply(_message.Message):
    __slots__ = ("reply_json",)
    REPLY_JSON_FIELD_NUMBER: _ClassVar[int]
    reply_json: bytes
    def __init__(self, reply_json: _Optional[bytes] = ...) -> None: ...
