from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("summary", "versions", "manifest_json", "row_stride_bytes", "resident_bytes")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    ROW_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    summary: TableSummary
    versions: _containers.RepeatedScalarFieldContainer[str]
    manifest_json: str
    row_stride_bytes: int
    resident_bytes: int
    def __init__(self, summary: _Optional[_Union[TableSummary, _Mapping]] = ..., versions: _Optional[_Iterable[str]] = ..., manifest_json: _Optional[str] = ..., row_stride_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("uptime_s", "frontend", "kernels", "methods")
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    frontend: str
    kernels: str
    methods: _containers.RepeatedCompositeFieldContainer[MethodStats]
    def __init__(self, uptime_s: _Optional[float] = ..., frontend: _Optional[str] = ..., kernels: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[MethodStats, _Mapping]]] = ...) -> None: ...

class MethodStats(_message.Message):
    __slots__ = ("method", "handled", "failed", "rows")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    method: str
    handled: int
    failed: int
    rows: int
    def __init__(self, method: _Optional[str] = ..., handled: _Optional[int] = ..., failed: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...
