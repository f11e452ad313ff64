from typing import Any

from numpy.typing import NDArray

BUCKET_BYTES: int
MAX_INDEXED_ROWS: int

def encode(
    values: NDArray[Any], out: Any, row_type: int, wide: bool, scheme: int, calibration: int, kernels: str = ""
) -> dict[str, Any]: ...
def kernels() -> str: ...
def has_kernels(name: str) -> bool: ...
def stride(row_type: int, wide: bool, dim: int) -> int: ...
def index_buckets(n_keys: int) -> int: ...

class Table:
    def __init__(
        self, rows: Any, dim: int, row_type: int, wide: bool, index: Any = None, seed: int = 0, kernels: str = "",
        upserts: Table | None = None,
    ) -> None: ...  # fmt: skip
    @property
    def n_rows(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def kernels(self) -> str: ...
    def row_bytes(self, output: int) -> int: ...
    def gather(self, ids: Any, output: int, fill: Any, out: Any, floor: bool = False) -> bytes | None: ...
    def pool(
        self, ids: Any, offsets: Any, weights: Any, mean: bool, output: int, fill: Any, out: Any
    ) -> bytes | None: ...
    def find(self, ids: Any, out: Any) -> None: ...
    def topk(
        self,
        queries: Any,
        metric: int,
        keys: Any,
        allow: Any,
        excluded: Any,
        spans: Any,
        dropped: Any,
        min_score: float | None,
        positions: Any,
        scores: Any,
        counts: Any,
    ) -> None: ...
    def rescore(
        self,
        queries: Any,
        metric: int,
        keys: Any,
        candidates: Any,
        excluded: Any,
        spans: Any,
        dropped: Any,
        min_score: float | None,
        positions: Any,
        scores: Any,
        counts: Any,
        considered: Any,
    ) -> None: ...

class KeyIndexPart:
    def __init__(self, n_buckets: int, seed: int) -> None: ...
    def begin(self, buckets: Any, lo: int, hi: int) -> None: ...
    def add(self, keys: Any, first_position: int) -> None: ...
    @property
    def duplicate(self) -> tuple[int, int, int] | None: ...
    @property
    def overflowed(self) -> bool: ...
