from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("table", "ids", "version", "output", "pooling", "offsets", "weights", "on_missing", "on_unavailable")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ON_MISSING_FIELD_NUMBER: _ClassVar[int]
    ON_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    table: str
    ids: _containers.RepeatedScalarFieldContainer[bytes]
    version: str
    output: int
    pooling: int
    offsets: _containers.RepeatedScalarFieldContainer[bytes]
    weights: _containers.RepeatedScalarFieldContainer[bytes]
    on_missing: int
    on_unavailable: int
    def __init__(self, table: _Optional[str] = ..., ids: _Optional[_Iterable[bytes]] = ..., version: _Optional[str] = ..., output: _Optional[int] = ..., pooling: _Optional[int] = ..., offsets: _Optional[_Iterable[bytes]] = ..., weights: _Optional[_Iterable[bytes]] = ..., on_missing: _Optional[int] = ..., on_unavailable: _Optional[int] = ...) -> None: ...

class TierCounts(_message.Message):
    __slots__ = ("gpu", "ram", "disk", "redis")
    GPU_FIELD_NUMBER: _ClassVar[int]
    RAM_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    REDIS_FIELD_NUMBER: _ClassVar[int]
    gpu: int
    ram: int
    disk: int
    redis: int
    def __init__(self, gpu: _Optional[int] = ..., ram: _Optional[int] = ..., disk: _Optional[int] = ..., redis: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("version", "dim", "values", "raw", "missing", "tiers", "degraded", "degraded_positions")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    dim: int
    values: bytes
    raw: bytes
    missing: bytes
    tiers: TierCounts
    degraded: bool
    degraded_positions: bytes
    def __init__(self, version: _Optional[str] = ..., dim: _Optional[int] = ..., values: _Optional[bytes] = ..., raw: _Optional[bytes] = ..., missing: _Optional[bytes] = ..., tiers: _Optional[_Union[TierCounts, _Mapping]] = ..., degraded: _Optional[bool] = ..., degraded_positions: _Optional[bytes] = ...) -> None: ...

class LookupBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LookupRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LookupRequest, _Mapping]]] = ...) -> None: ...

class LookupBatchResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[LookupResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[LookupResponse, _Mapping]]] = ...) -> None: ...

class IdList(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SearchParams(_message.Message):
    __slots__ = ("nprobe", "ef_search", "oversample")
    NPROBE_FIELD_NUMBER: _ClassVar[int]
    EF_SEARCH_FIELD_NUMBER: _ClassVar[int]
    OVERSAMPLE_FIELD_NUMBER: _ClassVar[int]
    nprobe: int
    ef_search: int
    oversample: int
    def __init__(self, nprobe: _Optional[int] = ..., ef_search: _Optional[int] = ..., oversample: _Optional[int] = ...) -> None: ...

class TopKRequest(_message.Message):
    __slots__ = ("table", "vectors", "query_ids", "query_table", "k", "exclude", "exclude_each", "allow", "min_score", "exact", "params", "version", "include_vectors")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    QUERY_IDS_FIELD_NUMBER: _ClassVar[int]
    QUERY_TABLE_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_EACH_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    MIN_SCORE_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_VECTORS_FIELD_NUMBER: _ClassVar[int]
    table: str
    vectors: _containers.RepeatedScalarFieldContainer[bytes]
    query_ids: _containers.RepeatedScalarFieldContainer[bytes]
    query_table: str
    k: int
    exclude: _containers.RepeatedScalarFieldContainer[bytes]
    exclude_each: _containers.RepeatedCompositeFieldContainer[IdList]
    allow: _containers.RepeatedScalarFieldContainer[bytes]
    min_score: float
    exact: bool
    params: SearchParams
    version: str
    include_vectors: int
    def __init__(self, table: _Optional[str] = ..., vectors: _Optional[_Iterable[bytes]] = ..., query_ids: _Optional[_Iterable[bytes]] = ..., query_table: _Optional[str] = ..., k: _Optional[int] = ..., exclude: _Optional[_Iterable[bytes]] = ..., exclude_each: _Optional[_Iterable[_Union[IdList, _Mapping]]] = ..., allow: _Optional[_Iterable[bytes]] = ..., min_score: _Optional[float] = ..., exact: _Optional[bool] = ..., params: _Optional[_Union[SearchParams, _Mapping]] = ..., version: _Optional[str] = ..., include_vectors: _Optional[int] = ...) -> None: ...

class TopKResponse(_message.Message):
    __slots__ = ("version", "ids", "scores", "counts", "vectors", "missing_queries", "exact")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    MISSING_QUERIES_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    version: str
    ids: bytes
    scores: bytes
    counts: bytes
    vectors: bytes
    missing_queries: bytes
    exact: bool
    def __init__(self, version: _Optional[str] = ..., ids: _Optional[bytes] = ..., scores: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., vectors: _Optional[bytes] = ..., missing_queries: _Optional[bytes] = ..., exact: _Optional[bool] = ...) -> None: ...

class UpsertRequest(_message.Message):
    __slots__ = ("table", "keys", "values")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("table", "keys")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...
