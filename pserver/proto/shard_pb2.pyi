from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Caller(_message.Message):
    __slots__ = ("generation", "rank")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class CommandRequest(_message.Message):
    __slots__ = ("caller", "name", "fields")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    name: str
    fields: bytes
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., name: _Optional[str] = ..., fields: _Optional[bytes] = ...) -> None: ...

class CommandReply(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("caller", "format", "shard", "num_shards", "num_ranks", "tables_json", "data_key", "memory")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    TABLES_JSON_FIELD_NUMBER: _ClassVar[int]
    DATA_KEY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    format: int
    shard: int
    num_shards: int
    num_ranks: int
    tables_json: bytes
    data_key: str
    memory: Memory
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., format: _Optional[int] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., num_ranks: _Optional[int] = ..., tables_json: _Optional[bytes] = ..., data_key: _Optional[str] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("data_address", "data_ticket", "data_key", "max_message_bytes", "opened_memory")
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_TICKET_FIELD_NUMBER: _ClassVar[int]
    DATA_KEY_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPENED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    data_address: str
    data_ticket: str
    data_key: str
    max_message_bytes: int
    opened_memory: bool
    def __init__(self, data_address: _Optional[str] = ..., data_ticket: _Optional[str] = ..., data_key: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., opened_memory: _Optional[bool] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("process", "descriptor", "number")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    process: int
    descriptor: int
    number: int
    def __init__(self, process: _Optional[int] = ..., descriptor: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...
