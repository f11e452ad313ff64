"""How many requests were answered, how, and how long each took: by method, since the start and of late.

Durations are counted in buckets no wider than a sixteenth of what they hold (Tene's HdrHistogram has the idea), so that
histograms can be added and subtracted: what happened in the last ten seconds is what is counted now without what was
counted then.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SUB_BITS = 4
BUCKETS = 560  # the last one begins at some 15 hours
WINDOWS_S = (10, 60)
QUANTILES = (0.5, 0.9, 0.99, 0.999)
OK = "OK"


def bucket_of(us: int) -> int:
    """The bucket of a duration in microseconds: exact below 32, then 16 to each power of two."""
    shift = us.bit_length() - SUB_BITS - 1
    if shift <= 0:
        return us
    return min((shift << SUB_BITS) + (us >> shift), BUCKETS - 1)


def upper_us(bucket: int) -> int:
    """The first duration past a bucket."""
    if bucket < 2 << SUB_BITS:
        return bucket + 1
    shift = (bucket >> SUB_BITS) - 1
    return ((bucket & 15 | 16) + 1) << shift


def quantile_s(counts: Sequence[int], q: float) -> float:
    """Seconds within which a share q of durations lies, by the upper end of its bucket; 0 of none."""
    rank, seen = q * sum(counts), 0
    if not rank:
        return 0.0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= rank:
            return upper_us(bucket) / 1e6
    return upper_us(BUCKETS - 1) / 1e6


class MethodStats:
    """One method's counts since start. `kind`: unary, or bidi_stream, whose messages count one by one."""

    def __init__(self, kind: str = "unary") -> None:
        self.kind = kind
        self.codes: Counter[str] = Counter()
        self.rows = self.sum_us = 0
        self.counts = [0] * BUCKETS
        self._lock = threading.Lock()

    @property
    def handled(self) -> int:
        return sum(self.codes.values())

    @property
    def failed(self) -> int:
        return self.handled - self.codes[OK]

    def ended(self, begun: float, rows: int, code: str = OK) -> None:
        """One call, or message of a stream, that was begun at `begun` of time.perf_counter()."""
        us = int((time.perf_counter() - begun) * 1e6)
        with self._lock:
            self.codes[code] += 1
            self.rows += rows
            self.sum_us += us
            self.counts[bucket_of(us)] += 1

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(time.monotonic(), dict(self.codes), self.rows, self.sum_us, tuple(self.counts))


@dataclass(frozen=True)
class Snapshot:
    """A method's counts at one moment."""

    at: float
    codes: Mapping[str, int]
    rows: int
    sum_us: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """seconds: how long it is; qps: calls a second; latencies in seconds, by QUANTILES."""

    seconds: float
    calls: int
    qps: float
    latencies_s: tuple[float, ...]


class Windows:
    """What each method did of late. `note` once a second."""

    def __init__(self, methods: Mapping[str, MethodStats]) -> None:
        self._methods = methods
        self._past: dict[str, deque[Snapshot]] = {
            name: deque([stats.snapshot()], maxlen=max(WINDOWS_S) + 2) for name, stats in methods.items()
        }
        self._began = {name: past[0] for name, past in self._past.items()}

    def note(self) -> None:
        for name, stats in self._methods.items():
            self._past[name].append(stats.snapshot())

    def of(self, method: str) -> list[Window]:
        """The last WINDOWS_S, as far as there is a past so long, and since the start."""
        now = self._methods[method].snapshot()
        past = list(self._past[method])
        begins = [min(past, key=lambda each: abs(now.at - each.at - seconds)) for seconds in WINDOWS_S]
        return [_between(begin, now) for begin in (*begins, self._began[method])]


def _between(begin: Snapshot, end: Snapshot) -> Window:
    counts = [b - a for a, b in zip(begin.counts, end.counts, strict=True)]
    seconds, calls = max(end.at - begin.at, 1e-9), sum(counts)
    return Window(seconds, calls, calls / seconds, tuple(quantile_s(counts, q) for q in QUANTILES))
