"""Which kinds of index are worth trying for a table, and how each can be told to search harder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from embedserve.index.approximate import Params

OVERSAMPLES = (5, 10, 20, 35, 50, 100)
BREADTHS = (16, 32, 64, 128, 256, 512)
MOST_FLAT_ROWS = 4_000_000  # codes of more are not read through for every query
LEAST_LIST_ROWS = 20_000  # fewer are read through as quickly as they are looked up


@dataclass(frozen=True)
class Family:
    """spec: FAISS factory string. bytes_a_row: about what it takes, ids included."""

    spec: str
    bytes_a_row: float
    coarse: bool = True  # its own distances are too coarse to rank by

    def searches(self) -> Iterator[Params]:
        """Ever harder searches, in an order in which both recall and time mostly rise."""
        oversamples = OVERSAMPLES if self.coarse else (2, 5)
        if self.lists:
            for oversample in oversamples:
                probes = 1
                while probes <= max(1, self.lists // 2):
                    yield Params(nprobe=probes, oversample=oversample)
                    probes *= 2
        elif "HNSW" in self.spec:
            for breadth in BREADTHS:
                yield Params(ef_search=breadth, oversample=2)
        else:
            for oversample in oversamples:
                yield Params(oversample=oversample)

    @property
    def lists(self) -> int:
        found = re.search(r"IVF(\d+)", self.spec)
        return int(found[1]) if found else 0


def families(rows: int, dim: int, memory: float) -> list[Family]:
    """Those that take at most `memory` of what the rows take as FP32, the smallest first."""
    pieces = _pieces(dim)
    lists = 1 << max(4, round((rows**0.5) * 1.5).bit_length() - 1)
    found = []
    if rows <= MOST_FLAT_ROWS:
        found.append(Family(f"PQ{pieces}x4fs", pieces / 2))
    if rows >= LEAST_LIST_ROWS:
        found += [
            Family(f"IVF{lists},PQ{pieces}x4fs", pieces / 2 + 8),
            Family(f"IVF{lists},RaBitQ", dim / 8 + 16),
            Family(f"IVF{lists},SQ8", dim + 8, coarse=False),
            Family(f"IVF{lists},Flat", 4 * dim + 8, coarse=False),
        ]
    found += [Family("HNSW16,SQ8", dim + 150, coarse=False), Family("HNSW32,Flat", 4 * dim + 280, coarse=False)]
    # Centroids and the like come on top, and count for little in a table worth an index.
    return sorted((each for each in found if each.bytes_a_row <= memory * 4 * dim), key=lambda each: each.bytes_a_row)


def _pieces(dim: int) -> int:
    """Into how many parts of two dimensions or a few more a vector is cut."""
    return next(pieces for pieces in range(max(1, dim // 2), 0, -1) if dim % pieces == 0)
