"""Counts of what was answered, by method."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class MethodStats:
    """One method's counts since start; updated under its lock, read without."""

    handled: int = 0
    failed: int = 0
    rows: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def succeeded(self, rows: int) -> None:
        with self._lock:
            self.handled += 1
            self.rows += rows

    def failed_once(self) -> None:
        with self._lock:
            self.handled += 1
            self.failed += 1
