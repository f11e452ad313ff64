"""Builds the hash index of a table with its own keys; its bytes are specified in kernels/key_index.h."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from embedserve.quant.errors import SourceError
from embedserve.quant.kernels import _native

PART_BYTES = 128 << 20
BUCKET_BYTES = int(_native.BUCKET_BYTES)
MAX_ROWS = int(_native.MAX_INDEXED_ROWS)

Keys = npt.NDArray[np.int64]


def bucket_count(n_keys: int) -> int:
    """64-byte buckets of the index of n keys."""
    return int(_native.index_buckets(n_keys))


def build(
    n_keys: int, chunks: Callable[[], Iterator[tuple[int, Keys]]], seed: int, write: Callable[[memoryview], object]
) -> bool:
    """Writes the index part by part in order, reading all keys once a part, so that memory stays at PART_BYTES.

    `chunks()` yields (first position, keys [n]). Returns False if this seed leaves a key without room
    (only keys chosen against the seed do that): begin again with another. Raises SourceError on a duplicate.
    """
    total = bucket_count(n_keys)
    part = _native.KeyIndexPart(total, seed)
    per_part = PART_BYTES // BUCKET_BYTES
    for lo in range(0, total, per_part):
        hi = min(lo + per_part, total)
        buckets = np.zeros((hi - lo) * BUCKET_BYTES, np.uint8)
        part.begin(buckets, lo, hi)
        for first, keys in chunks():
            part.add(keys, first)
            if part.duplicate is not None:
                break
        if part.duplicate is not None:
            key, a, b = part.duplicate
            raise SourceError(f"key {key} appears twice, at rows {a} and {b}; keys must be distinct")
        if part.overflowed:
            return False
        write(buckets.data)
    return True
