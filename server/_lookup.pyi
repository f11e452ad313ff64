from collections.abc import Mapping, Sequence
from typing import Any

from embedserve.quant.kernels._native import Table

class Responder:
    def __init__(
        self, table: Table, version: str, default_rows: Sequence[bytes | None], fits_float16: bool
    ) -> None: ...
    def rows(self, ids: Any, output: int, on_missing: int) -> tuple[bytes | None, bytes | None]: ...
    def pooled(
        self, ids: Any, offsets: Any, weights: Any, mean: bool, output: int, on_missing: int
    ) -> tuple[bytes | None, bytes | None]: ...

class Lookups:
    def __init__(self, tables: Mapping[str, tuple[Responder, Mapping[str, Responder]]]) -> None: ...
    def answer(self, request: bytes, max_ids: int, max_response_bytes: int) -> tuple[bytes, int] | None: ...
