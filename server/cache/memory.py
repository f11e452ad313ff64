"""What the operating system is told about memory: map it now, keep it, let go of it. Each call releases the GIL."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 4 << 20  # done at once: some milliseconds at most
MADV_POPULATE_READ = 22  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class Pace:
    """Holds a loop over bytes to a rate, by sleeping; None: as fast as it goes."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self._due = time.monotonic()

    def after(self, n_bytes: int) -> None:
        """Sleeps until `n_bytes` more may have passed."""
        if not self._rate:
            return
        self._due = max(self._due, time.monotonic() - 0.05) + n_bytes / self._rate
        left = self._due - time.monotonic()
        if left > 0:
            time.sleep(left)


def populate(array: npt.NDArray[np.uint8]) -> None:
    """Maps every page of an array, so that no request waits for one."""
    start, length = _pages(array)
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_POPULATE_READ) != 0:
        array[:: mmap.PAGESIZE].max(initial=0)  # an older kernel: one byte of each page


def lock(array: npt.NDArray[np.uint8]) -> str | None:
    """Keeps an array from being paged out. Returns what stood against it, if anything."""
    start, length = _pages(array)
    failed = _libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(length)) != 0
    return os.strerror(ctypes.get_errno()) if failed else None


def release(mapping: mmap.mmap, pace: Pace) -> None:
    """Unmaps piece by piece: one munmap of a large mapping holds up every thread that maps or faults meanwhile."""
    array = np.frombuffer(mapping, np.uint8)
    start = array.ctypes.data
    length = len(array)
    del array
    for offset in range(0, length, PIECE_BYTES):
        n = min(PIECE_BYTES, length - offset)
        if _libc.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(n), mmap.MADV_DONTNEED) != 0:
            if ctypes.get_errno() != errno.EINVAL:  # locked pages refuse
                break
            _libc.munlock(ctypes.c_void_p(start + offset), ctypes.c_size_t(n))
        pace.after(n)
    mapping.close()


def machine_bytes() -> int:
    """Memory that this process may have: the machine's, or its container's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such hierarchy, or no limit ("max")
    return total


def _pages(array: npt.NDArray[np.uint8]) -> tuple[int, int]:
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return start, array.ctypes.data + array.nbytes - start
