"""The ram tier: a version's rows in this machine's memory, whole.

By default they are the artifact's pages in the page cache, shared with every process that maps it. With
huge pages they are copied into anonymous memory, where the kernel can back them with 2 MB pages (a file's
mapping cannot be).
"""

from __future__ import annotations

import gc
import hashlib
import logging
import mmap
import time
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from embedserve.quant import Artifact
from embedserve.quant.errors import ArtifactError, ConfigError
from embedserve.quant.kernels import _native
from embedserve.server.cache.memory import PIECE_BYTES, Pace, lock, populate, release

log = logging.getLogger(__name__)
COPY_BYTES = 4 << 20
HUGE_PAGE_BYTES = 2 << 20
DRAIN_POLL_S = 0.02
COLLECT_AFTER_S = 2.0


class RamTable:
    """One version's rows, ready for the kernels: whoever makes a native table over `rows` keeps them alive."""

    def __init__(
        self, artifact: Artifact, pace: Pace, huge_pages: bool = False, lock_memory: bool = False, check: bool = False
    ) -> None:
        """Touches every page, so that no request waits for the disk, and with `check` compares every byte with its hash.

        Raises ArtifactError if the bytes are not those that were written, ConfigError if memory cannot be locked.
        """
        _read_through(artifact, pace, check)
        self._mappings = [artifact.mapping]
        rows = artifact.rows
        if huge_pages:
            memory, rows = _copy_to_huge_pages(rows, pace)
            self._mappings.append(memory)
        self.resident_bytes = rows.nbytes if huge_pages else 0
        self.memory_bytes = artifact.rows_entry.bytes
        if lock_memory and (reason := lock(rows.reshape(-1))):
            raise ConfigError(
                f"lock_memory: cannot lock {rows.nbytes:,} bytes: {reason}; raise RLIMIT_MEMLOCK (ulimit -l) or turn it off"
            )
        self.rows = rows
        # Whatever reads the version's memory holds one of these two.
        self._readers = [weakref.ref(artifact.rows), weakref.ref(rows)]

    def lookup_rows(self, table: _native.Table, upserts: _native.Table | None) -> _native.Table:
        """What Lookup reads: `table`, which has the upserts."""
        return table

    def leave(self) -> Leaving:
        """What is left to do once nobody is told of this version any more."""
        return Leaving(self._mappings, self._readers)


class Leaving:
    """A version's memory on its way out: unmapped in pieces, once the last request that reads it has ended."""

    def __init__(self, mappings: list[mmap.mmap], readers: list[weakref.ref[Any]]) -> None:
        self._mappings, self._readers = mappings, readers

    def finish(self, pace: Pace) -> None:
        """Waits for the readers, then frees."""
        begun, collected = time.monotonic(), False
        while any(reader() is not None for reader in self._readers):
            time.sleep(DRAIN_POLL_S)
            if not collected and time.monotonic() - begun > COLLECT_AFTER_S:
                gc.collect()  # an error's traceback may hold what its request read
                collected = True
        for mapping in self._mappings:
            release(mapping, pace)


def _read_through(artifact: Artifact, pace: Pace, check: bool) -> None:
    artifact.mapping.madvise(mmap.MADV_WILLNEED if not check else mmap.MADV_SEQUENTIAL)
    data = np.frombuffer(artifact.mapping, np.uint8)
    entry = artifact.rows_entry
    digest: Any = None
    if check:
        digest = xxhash.xxh3_64() if entry.xxh3 else hashlib.sha256()
    for first in range(0, len(data), PIECE_BYTES):
        piece = data[first : first + PIECE_BYTES]
        populate(piece)
        if digest is not None:
            digest.update(piece.data)
        pace.after(len(piece))
    artifact.mapping.madvise(mmap.MADV_NORMAL)
    if digest is not None and digest.hexdigest() not in (entry.xxh3, entry.sha256):
        raise ArtifactError(
            f"{artifact.directory}: its rows are not those that were written ({digest.name} {digest.hexdigest()})"
        )


def _copy_to_huge_pages(rows: npt.NDArray[np.uint8], pace: Pace) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    memory = mmap.mmap(-1, rows.nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(memory, np.uint8)
    start = -target.ctypes.data % HUGE_PAGE_BYTES
    copy = target[start : start + rows.nbytes].reshape(rows.shape)
    step = max(1, COPY_BYTES // rows.shape[1])
    for first in range(0, len(rows), step):
        copy[first : first + step] = rows[first : first + step]
        pace.after(min(step, len(rows) - first) * rows.shape[1])
    return memory, copy
