"""The ram tier: a version's rows in this machine's memory, whole.

By default they are the artifact's pages in the page cache, shared with every process that maps it. With
huge pages they are copied into anonymous memory, where the kernel can back them with 2 MB pages (a file's
mapping cannot be).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

import numpy as np
import numpy.typing as npt

from embedserve.quant import Artifact
from embedserve.quant.errors import ConfigError

log = logging.getLogger(__name__)
COPY_BYTES = 16 << 20
HUGE_PAGE_BYTES = 2 << 20


class RamTable:
    """One version's rows, ready for the kernels: `table` borrows them; both live as long as this object."""

    def __init__(self, artifact: Artifact, huge_pages: bool = False, lock_memory: bool = False) -> None:
        """Touches every page, so that no request waits for the disk. Raises ConfigError if memory cannot be locked."""
        rows = artifact.rows
        if huge_pages:
            rows = _copy_to_huge_pages(rows)
        else:
            _read_ahead(artifact.mapping)
        self.resident_bytes = rows.nbytes if huge_pages else 0
        if lock_memory:
            _lock(rows)
        self._rows = rows
        self.table = artifact.native_table(rows)


def _read_ahead(mapping: mmap.mmap) -> None:
    mapping.madvise(mmap.MADV_WILLNEED)
    # One byte of each page: maps it now rather than in a request.
    np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE].max()


def _copy_to_huge_pages(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    memory = mmap.mmap(-1, rows.nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(memory, np.uint8)
    start = -target.ctypes.data % HUGE_PAGE_BYTES
    copy = target[start : start + rows.nbytes].reshape(rows.shape)
    step = max(1, COPY_BYTES // rows.shape[1])
    for first in range(0, len(rows), step):
        copy[first : first + step] = rows[first : first + step]
    return copy


def _lock(rows: npt.NDArray[np.uint8]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    start = rows.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = rows.ctypes.data + rows.nbytes - start
    if libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(length)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"lock_memory: cannot lock {length:,} bytes: {reason}; raise RLIMIT_MEMLOCK (ulimit -l) or turn it off"
        )
