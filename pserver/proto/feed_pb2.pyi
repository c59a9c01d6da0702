from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubscribeRequest(_message.Message):
    __slots__ = ("format", "since", "generation")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    format: int
    since: int
    generation: int
    def __init__(self, format: _Optional[int] = ..., since: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class PokeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PokeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FeedRows(_message.Message):
    __slots__ = ("table", "num_rows", "width", "num_gone")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_GONE_FIELD_NUMBER: _ClassVar[int]
    table: str
    num_rows: int
    width: int
    num_gone: int
    def __init__(self, table: _Optional[str] = ..., num_rows: _Optional[int] = ..., width: _Optional[int] = ..., num_gone: _Optional[int] = ...) -> None: ...

class FeedTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class FeedPart(_message.Message):
    __slots__ = ("kind", "version", "whole", "tables", "tensors", "facts_json", "onnx", "payload")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        BEGIN: _ClassVar[FeedPart.Kind]
        BASE: _ClassVar[FeedPart.Kind]
        READ: _ClassVar[FeedPart.Kind]
        ROWS: _ClassVar[FeedPart.Kind]
        VERSION: _ClassVar[FeedPart.Kind]
    BEGIN: FeedPart.Kind
    BASE: FeedPart.Kind
    READ: FeedPart.Kind
    ROWS: FeedPart.Kind
    VERSION: FeedPart.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FACTS_JSON_FIELD_NUMBER: _ClassVar[int]
    ONNX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    kind: FeedPart.Kind
    version: int
    whole: bool
    tables: _containers.RepeatedCompositeFieldContainer[FeedRows]
    tensors: _containers.RepeatedCompositeFieldContainer[FeedTensor]
    facts_json: bytes
    onnx: bytes
    payload: bytes
    def __init__(self, kind: _Optional[_Union[FeedPart.Kind, str]] = ..., version: _Optional[int] = ..., whole: _Optional[bool] = ..., tables: _Optional[_Iterable[_Union[FeedRows, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[FeedTensor, _Mapping]]] = ..., facts_json: _Optional[bytes] = ..., onnx: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
