"""The safetensors container, as far as this project needs it: named arrays at offsets of a file.

The format (8-byte little-endian header length, JSON header, data without holes) is that of the
`safetensors` library, which reads what is written here; that library itself neither says where an array
lies, which mapping needs, nor writes one that does not fit memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class SafetensorsError(ValueError):
    """What is wrong with the file, in one sentence without its name."""


@dataclass(frozen=True)
class Tensor:
    """One array: its dtype by safetensors' name, its shape, and its place counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        n = ITEM_BYTES[self.dtype]
        for size in self.shape:
            n *= size
        return n


def build_header(
    tensors: dict[str, tuple[str, tuple[int, ...]]], alignment: int = 64
) -> tuple[bytes, dict[str, Tensor]]:
    """The header for arrays laid end to end in the order given, padded so that data begins aligned."""
    entries, placed, at = {}, {}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = Tensor(dtype, shape, 0).nbytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        placed[name] = (dtype, shape, at)
        at += nbytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-(len(body) + 8) % alignment)
    data_start = 8 + len(body)
    header = len(body).to_bytes(8, "little") + body
    return header, {name: Tensor(dtype, shape, data_start + offset) for name, (dtype, shape, offset) in placed.items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """Parses and checks a file's header. Raises SafetensorsError; never reads the data."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise SafetensorsError("truncated: shorter than a header")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise SafetensorsError(
                f"not a safetensors file, or truncated: header of {length} bytes in a file of {size}"
            )
        body = file.read(length)
    try:
        entries = json.loads(body)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SafetensorsError(f"header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise SafetensorsError("header is not a JSON object")
    entries.pop("__metadata__", None)
    data_start = 8 + length
    tensors = {name: _tensor(name, entry, data_start) for name, entry in entries.items()}
    at = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != at:
            raise SafetensorsError(f"array {name!r} leaves a hole or overlaps another")
        at += tensor.nbytes
    if at != size:
        raise SafetensorsError(f"truncated or too long: arrays end at byte {at}, the file at {size}")
    return tensors


def _tensor(name: str, entry: object, data_start: int) -> Tensor:
    try:
        if not isinstance(entry, dict):
            raise TypeError
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        tensor = Tensor(dtype, tuple(shape), data_start + begin)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end))
        if not whole or begin + tensor.nbytes != end:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise SafetensorsError(f"array {name!r} has a malformed header entry") from None
    return tensor
