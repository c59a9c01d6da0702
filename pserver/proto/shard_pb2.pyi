from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Caller(_message.Message):
    __slots__ = ("generation", "rank")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class CallerRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

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

class PassRequest(_message.Message):
    __slots__ = ("caller", "pass_number")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    pass_number: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., pass_number: _Optional[int] = ...) -> None: ...

class RecallRequest(_message.Message):
    __slots__ = ("caller", "pass_number", "questions")
    class QuestionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HistoryQuestions
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HistoryQuestions, _Mapping]] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    pass_number: int
    questions: _containers.MessageMap[str, HistoryQuestions]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., pass_number: _Optional[int] = ..., questions: _Optional[_Mapping[str, HistoryQuestions]] = ...) -> None: ...

class HistoryQuestions(_message.Message):
    __slots__ = ("group", "keys", "events", "lengths", "signs")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SIGNS_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: bytes
    events: bytes
    lengths: bytes
    signs: bytes
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[bytes] = ..., events: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., signs: _Optional[bytes] = ...) -> None: ...

class RecallReply(_message.Message):
    __slots__ = ("answers",)
    class AnswersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HistoryAnswers
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HistoryAnswers, _Mapping]] = ...) -> None: ...
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.MessageMap[str, HistoryAnswers]
    def __init__(self, answers: _Optional[_Mapping[str, HistoryAnswers]] = ...) -> None: ...

class HistoryAnswers(_message.Message):
    __slots__ = ("lengths", "signs")
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SIGNS_FIELD_NUMBER: _ClassVar[int]
    lengths: bytes
    signs: bytes
    def __init__(self, lengths: _Optional[bytes] = ..., signs: _Optional[bytes] = ...) -> None: ...

class JoinClockRequest(_message.Message):
    __slots__ = ("caller", "pass_number", "max_ahead_s", "firsts", "lasts", "counts")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    FIRSTS_FIELD_NUMBER: _ClassVar[int]
    LASTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    pass_number: int
    max_ahead_s: float
    firsts: bytes
    lasts: bytes
    counts: bytes
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., pass_number: _Optional[int] = ..., max_ahead_s: _Optional[float] = ..., firsts: _Optional[bytes] = ..., lasts: _Optional[bytes] = ..., counts: _Optional[bytes] = ...) -> None: ...

class JoinClockReply(_message.Message):
    __slots__ = ("bound_s",)
    BOUND_S_FIELD_NUMBER: _ClassVar[int]
    bound_s: float
    def __init__(self, bound_s: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("caller", "pass_number", "keys", "places", "times", "labels", "lengths", "samples", "holds", "part", "num_parts", "answer", "all_times", "streams", "runs")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ALL_TIMES_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    pass_number: int
    keys: bytes
    places: bytes
    times: bytes
    labels: bytes
    lengths: bytes
    samples: bytes
    holds: bool
    part: int
    num_parts: int
    answer: int
    all_times: bytes
    streams: bytes
    runs: bytes
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., pass_number: _Optional[int] = ..., keys: _Optional[bytes] = ..., places: _Optional[bytes] = ..., times: _Optional[bytes] = ..., labels: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., samples: _Optional[bytes] = ..., holds: _Optional[bool] = ..., part: _Optional[int] = ..., num_parts: _Optional[int] = ..., answer: _Optional[int] = ..., all_times: _Optional[bytes] = ..., streams: _Optional[bytes] = ..., runs: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("outcomes", "joined", "expired", "num_unmatched", "num_answers", "positions", "ends")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNMATCHED_FIELD_NUMBER: _ClassVar[int]
    NUM_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    joined: ReleasedSamples
    expired: ReleasedSamples
    num_unmatched: int
    num_answers: int
    positions: bytes
    ends: bytes
    def __init__(self, outcomes: _Optional[bytes] = ..., joined: _Optional[_Union[ReleasedSamples, _Mapping]] = ..., expired: _Optional[_Union[ReleasedSamples, _Mapping]] = ..., num_unmatched: _Optional[int] = ..., num_answers: _Optional[int] = ..., positions: _Optional[bytes] = ..., ends: _Optional[bytes] = ...) -> None: ...

class ReleasedSamples(_message.Message):
    __slots__ = ("keys", "orders", "times", "labels", "lengths", "samples")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    orders: bytes
    times: bytes
    labels: bytes
    lengths: bytes
    samples: bytes
    def __init__(self, keys: _Optional[bytes] = ..., orders: _Optional[bytes] = ..., times: _Optional[bytes] = ..., labels: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., samples: _Optional[bytes] = ...) -> None: ...

class ClosePassRequest(_message.Message):
    __slots__ = ("caller", "pass_number", "day")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DAY_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    pass_number: int
    day: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., pass_number: _Optional[int] = ..., day: _Optional[int] = ...) -> None: ...

class ClosePassReply(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class OperateRequest(_message.Message):
    __slots__ = ("caller", "version", "operations_json")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    operations_json: bytes
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ..., operations_json: _Optional[bytes] = ...) -> None: ...

class FeedRequest(_message.Message):
    __slots__ = ("caller", "secret")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    secret: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class FeedReply(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("caller", "version")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class DigestReply(_message.Message):
    __slots__ = ("tables",)
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.ScalarMap[str, bytes]
    def __init__(self, tables: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class TableCounts(_message.Message):
    __slots__ = ("num_rows", "num_bytes", "new_rows", "rows_by_group", "dirty_rows", "max_dirty_rows", "sweeping", "unadmitted", "new_by_group")
    class RowsByGroupEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class NewByGroupEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEW_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_BY_GROUP_FIELD_NUMBER: _ClassVar[int]
    DIRTY_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_DIRTY_ROWS_FIELD_NUMBER: _ClassVar[int]
    SWEEPING_FIELD_NUMBER: _ClassVar[int]
    UNADMITTED_FIELD_NUMBER: _ClassVar[int]
    NEW_BY_GROUP_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    num_bytes: int
    new_rows: int
    rows_by_group: _containers.ScalarMap[int, int]
    dirty_rows: int
    max_dirty_rows: int
    sweeping: bool
    unadmitted: int
    new_by_group: _containers.ScalarMap[int, int]
    def __init__(self, num_rows: _Optional[int] = ..., num_bytes: _Optional[int] = ..., new_rows: _Optional[int] = ..., rows_by_group: _Optional[_Mapping[int, int]] = ..., dirty_rows: _Optional[int] = ..., max_dirty_rows: _Optional[int] = ..., sweeping: _Optional[bool] = ..., unadmitted: _Optional[int] = ..., new_by_group: _Optional[_Mapping[int, int]] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("tables", "refused", "figures_json")
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TableCounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TableCounts, _Mapping]] = ...) -> None: ...
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TABLES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FIGURES_JSON_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.MessageMap[str, TableCounts]
    refused: _containers.ScalarMap[str, int]
    figures_json: bytes
    def __init__(self, tables: _Optional[_Mapping[str, TableCounts]] = ..., refused: _Optional[_Mapping[str, int]] = ..., figures_json: _Optional[bytes] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("caller", "version", "changes_since")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGES_SINCE_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    changes_since: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ..., changes_since: _Optional[int] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("num_rows",)
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    def __init__(self, num_rows: _Optional[int] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("caller", "folder")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    folder: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., folder: _Optional[str] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("part_json",)
    PART_JSON_FIELD_NUMBER: _ClassVar[int]
    part_json: bytes
    def __init__(self, part_json: _Optional[bytes] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("caller", "committed")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    committed: bool
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., committed: _Optional[bool] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("caller", "folder", "parts_json", "version")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    PARTS_JSON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    folder: str
    parts_json: bytes
    version: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., folder: _Optional[str] = ..., parts_json: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...
