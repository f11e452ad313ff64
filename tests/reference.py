"""The numpy oracle: what every kernel must give, written for clarity and with no shortcut.

Arithmetic is FP32, product then sum, so results are equal to the bit unless a test states a bound.
"""

from __future__ import annotations

import numpy as np

F = np.float32
HALF = np.float16
INT8, INT4, FP16, FP32 = range(4)
SEARCH_BINS, SEARCH_STEPS = F(200), 32


def stride(row_type: int, wide: bool, dim: int) -> int:
    header = (8 if wide else 4) if row_type in (INT8, INT4) else 0
    codes = {INT8: dim, INT4: (dim + 1) // 2, FP16: 2 * dim, FP32: 4 * dim}[row_type]
    return -(-(header + codes) // 4) * 4


def fold(lanes: np.ndarray) -> np.float32:
    """Sum of 16 lanes in halves."""
    lanes = lanes.astype(F)
    for half in (8, 4, 2, 1):
        lanes = (lanes[:half] + lanes[half : 2 * half]).astype(F)
    return lanes[0]


class Encoder:
    """Quantises one row at a time."""

    def __init__(self, row_type: int, wide: bool, symmetric: bool, calibration: str) -> None:
        self.row_type, self.wide, self.symmetric, self.calibration = row_type, wide, symmetric, calibration
        self.top = F(255 if row_type == INT8 else 15)

    def stored(self, x: np.float32) -> np.float32:
        with np.errstate(over="ignore"):
            return F(x) if self.wide else F(HALF(x))

    def params(self, lo: np.float32, hi: np.float32) -> tuple[np.float32, np.float32]:
        if lo == hi:
            return F(0), self.stored(lo + F(0))  # +0 for -0
        if self.symmetric:
            scale = self.stored(max(abs(lo), abs(hi)) / ((self.top - F(1)) / F(2)))
            return scale, self.stored(-((self.top + F(1)) / F(2)) * scale)
        bias = self.stored(lo + F(0))
        return self.stored((hi - bias) / self.top), bias

    def lossy(self, lo: np.float32, hi: np.float32, scale: np.float32, bias: np.float32) -> bool:
        if lo == hi:
            return bool(bias != lo)
        ideal = max(abs(lo), abs(hi)) / ((self.top - F(1)) / F(2)) if self.symmetric else (hi - lo) / self.top
        worst = max(scale * F(0.5), bias - lo, hi - (bias + self.top * scale))
        return not worst <= ideal

    def codes(self, x: np.ndarray, scale: np.float32, bias: np.float32) -> np.ndarray:
        inverse = F(1) / scale if scale >= np.finfo(F).tiny else F(0)
        return np.rint(np.clip((x - bias) * inverse, F(0), self.top)).astype(F)

    def loss(self, x: np.ndarray, lo: np.float32, hi: np.float32) -> np.float32:
        scale, bias = self.params(lo, hi)
        error = (self.codes(x, scale, bias) * scale + bias) - x
        padded = np.zeros(-(-len(x) // 16) * 16, F)
        padded[: len(x)] = error
        total = np.zeros(16, F)
        for block in padded.reshape(-1, 16):
            total = total + block * block
        return fold(total)

    def search(self, x: np.ndarray, lo: np.float32, hi: np.float32) -> tuple[np.float32, np.float32]:
        best, best_loss = (lo, hi), self.loss(x, lo, hi)
        step = (hi - lo) / SEARCH_BINS
        for _ in range(SEARCH_STEPS):
            if self.symmetric:
                amax = max(abs(lo), abs(hi)) * (F(1) - F(1) / SEARCH_BINS)
                lo, hi = -amax, amax
                found = self.loss(x, lo, hi)
            else:
                left, right = self.loss(x, lo + step, hi), self.loss(x, lo, hi - step)
                lo, hi = (lo + step, hi) if left <= right else (lo, hi - step)
                found = min(left, right)
            if found < best_loss:
                best, best_loss = (lo, hi), found
        return best

    def percentile(self, x: np.ndarray) -> tuple[np.float32, np.float32]:
        ordered = np.sort(x)

        def at(q: np.float32) -> np.float32:
            where = q * F(len(x) - 1)
            below = int(where)
            a, b = ordered[below], ordered[min(below + 1, len(x) - 1)]
            return a + (b - a) * (where - F(below))

        return at(F(0.001)), at(F(1) - F(0.001))

    def row(self, x: np.ndarray) -> bytes | None:
        """Stored bytes, or None where the row needs wide ones."""
        if self.row_type == FP16:
            return pad(x.astype(HALF).tobytes())
        if self.row_type == FP32:
            return x.astype(F).tobytes()
        lo, hi = x.min(), x.max()
        if lo != hi and self.calibration == "percentile":
            lo, hi = self.percentile(x)
        elif lo != hi and self.calibration == "mse":
            lo, hi = self.search(x, lo, hi)
        scale, bias = self.params(lo, hi)
        if not self.wide and self.lossy(lo, hi, scale, bias):
            return None
        codes = self.codes(x, scale, bias).astype(np.uint8)
        if self.row_type == INT4:
            even = np.zeros(-(-len(codes) // 2) * 2, np.uint8)
            even[: len(codes)] = codes
            codes = even[0::2] | even[1::2] << 4
        kind = F if self.wide else HALF
        return pad(np.array([scale, bias], kind).tobytes() + codes.tobytes())


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def decode(rows: np.ndarray, row_type: int, wide: bool, dim: int) -> np.ndarray:
    """FP32 values [n, dim] of stored rows [n, stride]."""
    if row_type == FP32:
        return np.ascontiguousarray(rows[:, : 4 * dim]).view("<f4")
    if row_type == FP16:
        return np.ascontiguousarray(rows[:, : 2 * dim]).view("<f2").astype(F)
    at = 8 if wide else 4
    header = np.ascontiguousarray(rows[:, :at]).view("<f4" if wide else "<f2").astype(F)
    codes = rows[:, at:]
    if row_type == INT4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(rows), codes.shape[1] * 2)
    return codes[:, :dim].astype(F) * header[:, :1] + header[:, 1:]


def bfloat16(values: np.ndarray) -> np.ndarray:
    """uint16 bits, rounded half to even."""
    bits = values.astype(F).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def encoded(values: np.ndarray, output: int) -> np.ndarray:
    """Values as Lookup returns them, uint8 [n, row bytes]."""
    with np.errstate(over="ignore"):
        kinds = {0: lambda: values.astype("<f4"), 1: lambda: values.astype("<f2"), 2: lambda: bfloat16(values)}
    array = np.ascontiguousarray(kinds[output]())
    return array.view(np.uint8).reshape(len(values), array.shape[1] * array.itemsize)


def pool(values: np.ndarray, offsets: np.ndarray, weights: np.ndarray | None, mean: bool) -> np.ndarray:
    """Sums or means of bags, in FP32, ids in order."""
    ends = [*offsets[1:], len(values)]
    out = np.zeros((len(offsets), values.shape[1]), F)
    for bag, (begin, end) in enumerate(zip(offsets, ends, strict=True)):
        total = F(0)
        for i in range(begin, end):
            weight = F(1) if weights is None else weights[i]
            out[bag] = out[bag] + values[i] * weight
            total = total + weight
        out[bag] = out[bag] * (F(1) / total if mean and total != 0 else F(1))
    return out


def scores(queries: np.ndarray, rows: np.ndarray, metric: str) -> np.ndarray:
    """[Q, n] in float64."""
    q, r = queries.astype(np.float64), rows.astype(np.float64)
    if metric == "l2":
        return -np.square(q[:, None, :] - r[None]).sum(-1)
    dot = q @ r.T
    if metric == "cosine":
        norms = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(r, axis=1)[None]
        return np.divide(dot, norms, out=np.zeros_like(dot), where=norms > 0)
    return dot
