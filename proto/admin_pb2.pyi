from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReloadRequest(_message.Message):
    __slots__ = ("table", "version")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    table: str
    version: str
    def __init__(self, table: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableReload]
    def __init__(self, tables: _Optional[_Iterable[_Union[TableReload, _Mapping]]] = ...) -> None: ...

class TableReload(_message.Message):
    __slots__ = ("table", "version", "previous", "changed")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    table: str
    version: str
    previous: str
    changed: bool
    def __init__(self, table: _Optional[str] = ..., version: _Optional[str] = ..., previous: _Optional[str] = ..., changed: _Optional[bool] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("table", "version")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    table: str
    version: str
    def __init__(self, table: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: TableReload
    def __init__(self, table: _Optional[_Union[TableReload, _Mapping]] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: str
    def __init__(self, table: _Optional[str] = ...) -> None: ...

class UnloadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpsertRequest(_message.Message):
    __slots__ = ("table", "keys", "values")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class UpsertResponse(_message.Message):
    __slots__ = ("version", "upserted_rows")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPSERTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    version: str
    upserted_rows: int
    def __init__(self, version: _Optional[str] = ..., upserted_rows: _Optional[int] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("table", "keys")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[_Iterable[int]] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("loaded",)
    LOADED_FIELD_NUMBER: _ClassVar[int]
    loaded: int
    def __init__(self, loaded: _Optional[int] = ...) -> None: ...

class ListTablesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTablesResponse(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableSummary]
    def __init__(self, tables: _Optional[_Iterable[_Union[TableSummary, _Mapping]]] = ...) -> None: ...

class TableSummary(_message.Message):
    __slots__ = ("table", "version", "rows", "dim", "row_type", "metric")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    ROW_TYPE_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    table: str
    version: str
    rows: int
    dim: int
    row_type: str
    metric: str
    def __init__(self, table: _Optional[str] = ..., version: _Optional[str] = ..., rows: _Optional[int] = ..., dim: _Optional[int] = ..., row_type: _Optional[str] = ..., metric: _Optional[str] = ...) -> None: ...

class DescribeTableRequest(_message.Message):
    __slots__ = ("table", "version")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    table: str
    version: str
    def __init__(self, table: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class DescribeTableResponse(_message.Message):
    __slots__ = ("summary", "versions", "manifest_json", "row_stride_bytes", "resident_bytes", "upserted_rows", "loading", "refused")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    ROW_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPSERTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    summary: TableSummary
    versions: _containers.RepeatedScalarFieldContainer[str]
    manifest_json: str
    row_stride_bytes: int
    resident_bytes: int
    upserted_rows: int
    loading: str
    refused: Refusal
    def __init__(self, summary: _Optional[_Union[TableSummary, _Mapping]] = ..., versions: _Optional[_Iterable[str]] = ..., manifest_json: _Optional[str] = ..., row_stride_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., upserted_rows: _Optional[int] = ..., loading: _Optional[str] = ..., refused: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("version", "reason", "time")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    version: str
    reason: str
    time: str
    def __init__(self, version: _Optional[str] = ..., reason: _Optional[str] = ..., time: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("uptime_s", "frontend", "kernels", "methods", "tables", "in_progress", "pool_bytes")
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    IN_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    frontend: str
    kernels: str
    methods: _containers.RepeatedCompositeFieldContainer[MethodStats]
    tables: _containers.RepeatedCompositeFieldContainer[TableStats]
    in_progress: int
    pool_bytes: int
    def __init__(self, uptime_s: _Optional[float] = ..., frontend: _Optional[str] = ..., kernels: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[MethodStats, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[TableStats, _Mapping]]] = ..., in_progress: _Optional[int] = ..., pool_bytes: _Optional[int] = ...) -> None: ...

class TableStats(_message.Message):
    __slots__ = ("table", "version", "taken", "refused", "rolled_back", "last_reload_s", "upserted_rows", "memory_bytes", "tiers", "shadow_compared", "rows", "as_published", "loading", "shadow_differing")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    LAST_RELOAD_S_FIELD_NUMBER: _ClassVar[int]
    UPSERTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_COMPARED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    AS_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    SHADOW_DIFFERING_FIELD_NUMBER: _ClassVar[int]
    table: str
    version: str
    taken: int
    refused: int
    rolled_back: int
    last_reload_s: float
    upserted_rows: int
    memory_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    shadow_compared: int
    rows: int
    as_published: bool
    loading: str
    shadow_differing: int
    def __init__(self, table: _Optional[str] = ..., version: _Optional[str] = ..., taken: _Optional[int] = ..., refused: _Optional[int] = ..., rolled_back: _Optional[int] = ..., last_reload_s: _Optional[float] = ..., upserted_rows: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., shadow_compared: _Optional[int] = ..., rows: _Optional[int] = ..., as_published: _Optional[bool] = ..., loading: _Optional[str] = ..., shadow_differing: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "hits", "misses", "unknown", "rows", "bytes", "evictions", "declined", "unavailable", "fetches", "fetch_s", "state", "damaged_pages")
    TIER_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_PAGES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    hits: int
    misses: int
    unknown: int
    rows: int
    bytes: int
    evictions: int
    declined: int
    unavailable: int
    fetches: int
    fetch_s: float
    state: str
    damaged_pages: int
    def __init__(self, tier: _Optional[str] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., unknown: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., evictions: _Optional[int] = ..., declined: _Optional[int] = ..., unavailable: _Optional[int] = ..., fetches: _Optional[int] = ..., fetch_s: _Optional[float] = ..., state: _Optional[str] = ..., damaged_pages: _Optional[int] = ...) -> None: ...

class MethodStats(_message.Message):
    __slots__ = ("method", "handled", "failed", "rows", "codes", "windows")
    class CodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    method: str
    handled: int
    failed: int
    rows: int
    codes: _containers.ScalarMap[str, int]
    windows: _containers.RepeatedCompositeFieldContainer[Window]
    def __init__(self, method: _Optional[str] = ..., handled: _Optional[int] = ..., failed: _Optional[int] = ..., rows: _Optional[int] = ..., codes: _Optional[_Mapping[str, int]] = ..., windows: _Optional[_Iterable[_Union[Window, _Mapping]]] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("seconds", "calls", "qps", "p50_ms", "p90_ms", "p99_ms", "p999_ms")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    QPS_FIELD_NUMBER: _ClassVar[int]
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P90_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    P999_MS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    calls: int
    qps: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    def __init__(self, seconds: _Optional[float] = ..., calls: _Optional[int] = ..., qps: _Optional[float] = ..., p50_ms: _Optional[float] = ..., p90_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ..., p999_ms: _Optional[float] = ...) -> None: ...
