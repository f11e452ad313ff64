from collections.abc import Mapping, Sequence
from typing import Any

from embedserve.quant.kernels._native import Table

class ColdSource: ...

def disk_rows(
    path: str, rows_offset: int, n_rows: int, stride: int, index_offset: int, n_buckets: int, seed: int
) -> ColdSource: ...
def python_rows(source: Any, stride: int) -> ColdSource: ...
def rows_of_pages(
    values: list[bytes | None],
    names: list[bytes],
    numbers: Any,
    ids: Any,
    which: Any,
    row_type: int,
    dim: int,
    keyed: bool,
    rows_a_page: int,
    n_rows: int,
    rows: Any,
    statuses: Any,
) -> int: ...

class RowCache:
    def __init__(self, budget_bytes: int, policy: str, usual_row_bytes: int) -> None: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def policy(self) -> str: ...

class CachedRows:
    def __init__(
        self,
        table: Table,
        upserts: Table | None,
        cache: RowCache,
        cold: ColdSource,
        cold_tier: int,
        floor: int,
        ceiling: int,
        shadow_share: float,
    ) -> None: ...
    def with_upserts(self, upserts: Table | None) -> CachedRows: ...
    def gather(self, ids: Any, output: int, out: Any) -> tuple[bytes | None, bytes | None]: ...
    def warm(self, keys: Any) -> int: ...
    def hot_keys(self, most: int) -> bytes: ...
    def check_samples(self) -> tuple[int, list[int]]: ...
    def overwrite(self, key: int, byte: int) -> bool: ...
    def counts(self) -> dict[str, int]: ...

class Responder:
    def __init__(
        self, rows: Table | CachedRows, version: str, default_rows: Sequence[bytes | None], fits_float16: bool
    ) -> None: ...
    def rows(
        self, ids: Any, output: int, on_missing: int, on_unavailable: int
    ) -> tuple[bytes | None, bytes | None, bytes | None]: ...
    def pooled(
        self, ids: Any, offsets: Any, weights: Any, mean: bool, output: int, on_missing: int, on_unavailable: int
    ) -> tuple[bytes | None, bytes | None, bytes | None]: ...

class Lookups:
    def __init__(self, tables: Mapping[str, tuple[Responder, Mapping[str, Responder]]]) -> None: ...
    def answer(self, request: bytes, max_ids: int, max_response_bytes: int) -> tuple[bytes, int] | None: ...
