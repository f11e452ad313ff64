"""What can be imported: arrays in files, read a chunk of rows at a time.

A source is written `PATH` or `PATH:NAME`, where NAME picks one array of a file that holds several. Each
format is one function from a path to its named arrays; `OPENERS` lists them by suffix.
"""

from __future__ import annotations

import lzma
import mmap
import os
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from embedserve.quant.errors import SourceError
from embedserve.quant.safetensors_file import SafetensorsError, read_header

BFLOAT16 = "bfloat16"
CHUNK_BYTES = 4 << 20
MAPPED_BYTES = 64 << 20
# What zipfile raises on bytes that are no zip file, or no longer one.
DAMAGED_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ValueError,
    NotImplementedError,
    RuntimeError,
    EOFError,
    lzma.LZMAError,
    OSError,
)


@dataclass(frozen=True)
class StoredArray:
    """An array in a file. `dtype` is numpy's, or BFLOAT16 held as uint16; data begins `offset` bytes into
    the file, or, with `member`, into that member of a zip file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bfloat16: bool = False
    fortran: bool = False
    offset: int = 0
    member: str | None = None

    @property
    def dtype_name(self) -> str:
        return BFLOAT16 if self.bfloat16 else self.dtype.name

    @property
    def is_float(self) -> bool:
        return self.bfloat16 or self.dtype.kind == "f"

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.shape[0]

    def chunks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yields (first row, rows [n, ...]) in order, some megabytes at a time; every call begins anew."""
        per_chunk = max(1, CHUNK_BYTES // max(1, self.row_bytes))
        if self.member is None and not self.fortran and self.nbytes:
            yield from self._mapped_chunks(per_chunk)
            return
        with _open_data(self) as file:
            for first in range(0, self.shape[0], per_chunk):
                count = min(per_chunk, self.shape[0] - first)
                rows = self._columns(file, first, count) if self.fortran else self._rows(file, count)
                yield first, rows

    def _mapped_chunks(self, per_chunk: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Views of the page cache: a copy would take as long as quantising."""
        with open(self.path, "rb") as file:
            end = self.offset + self.nbytes
            mapping = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
            released = 0
            for first in range(0, self.shape[0], per_chunk):
                # A mapped page past a file's end kills the process; a file cut short meanwhile is caught here.
                if os.fstat(file.fileno()).st_size < end:
                    raise SourceError(f"{self.path}: was truncated while it was read")
                count = min(per_chunk, self.shape[0] - first)
                offset = self.offset + first * self.row_bytes
                values = count * self.row_bytes // self.dtype.itemsize
                yield first, np.frombuffer(mapping, self.dtype, values, offset).reshape(count, *self.shape[1:])
                # Pages that are done with leave this process's memory; they stay in the page cache.
                done = (offset - MAPPED_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
                if done > released:
                    mapping.madvise(mmap.MADV_DONTNEED, released, done - released)
                    released = done

    def _rows(self, file: IO[bytes], count: int) -> npt.NDArray[Any]:
        rows = np.empty((count, *self.shape[1:]), self.dtype)
        self._read_into(file, rows)
        return rows

    def _columns(self, file: IO[bytes], first: int, count: int) -> npt.NDArray[Any]:
        columns = np.empty((self.shape[1], count), self.dtype)
        for c in range(self.shape[1]):
            file.seek(self.offset + (c * self.shape[0] + first) * self.dtype.itemsize)
            self._read_into(file, columns[c])
        return columns.T

    def _read_into(self, file: IO[bytes], array: npt.NDArray[Any]) -> None:
        view = array.reshape(-1).view(np.uint8).data
        while view:
            try:
                n = file.readinto(view)  # type: ignore[attr-defined]  # typeshed's IO lacks it; every file opened here has it
            except DAMAGED_ZIP as error:
                raise SourceError(f"{self.path}: damaged: {error}") from None
            if not n:
                raise SourceError(f"{self.path}: truncated: the file ends before its array does")
            view = view[n:]


def to_float32(array: StoredArray, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A chunk's values in FP32, C-contiguous. FP64 values past FP32's range become infinite, and are refused as such."""
    if array.bfloat16:
        return (rows.astype("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.require(rows, np.float32, ["C", "A"])


def _open_data(array: StoredArray) -> IO[bytes]:
    if array.member is None:
        file: IO[bytes] = open(array.path, "rb", buffering=0)  # noqa: SIM115 (closed by the caller)
        file.seek(array.offset)
        return file
    try:
        with zipfile.ZipFile(array.path) as archive:
            member = archive.open(array.member)
            if not array.fortran:
                member.read(array.offset)
                return member
            # Column order needs seeks, which a compressed member cannot do: unpack it to an unnamed file.
            unpacked: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the caller)
            while block := member.read(CHUNK_BYTES):
                unpacked.write(block)
            return unpacked
    except DAMAGED_ZIP as error:
        raise SourceError(f"{array.path}: damaged: {error}") from None


def _npy_array(file: IO[bytes], path: Path, label: str, nbytes: int, member: str | None, offset: int) -> StoredArray:
    """Reads a .npy header at the file's position; `nbytes` is what header and data take together."""
    try:
        start = file.tell()
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"format version {version} is not one of 1.0 and 2.0")
        header_bytes = file.tell() - start
    except (*DAMAGED_ZIP, SyntaxError, TypeError, OverflowError, tokenize.TokenError, RecursionError) as error:
        raise SourceError(f"{label}: not a .npy array: {error}") from None
    if dtype.hasobject:
        raise SourceError(f"{label}: holds Python objects, which are never unpickled; save plain floats")
    array = StoredArray(
        path, tuple(shape), dtype, fortran=fortran and len(shape) > 1, offset=offset + header_bytes, member=member
    )
    expected = header_bytes + (array.nbytes if shape else dtype.itemsize)
    if nbytes != expected:
        raise SourceError(f"{label}: truncated or damaged: its header promises {expected} bytes, there are {nbytes}")
    return array


def _open_npy(path: Path) -> dict[str, StoredArray]:
    with open(path, "rb") as file:
        return {"": _npy_array(file, path, str(path), os.stat(path).st_size, None, 0)}


def _open_npz(path: Path) -> dict[str, StoredArray]:
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.filename.endswith(".npy"):
                    continue
                stored = info.compress_type == zipfile.ZIP_STORED
                with archive.open(info) as file:
                    array = _npy_array(
                        file, path, f"{path}:{info.filename[:-4]}", info.file_size,
                        None if stored else info.filename, _member_offset(path, info) if stored else 0,
                    )  # fmt: skip
                arrays[info.filename[:-4]] = array
    except DAMAGED_ZIP as error:
        raise SourceError(f"{path}: not a .npz file: {error}") from None
    return arrays


def _member_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where an uncompressed member's data begins: behind its local header (APPNOTE.TXT 4.3.7)."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
        if len(header) < 30:
            raise SourceError(f"{path}: truncated")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
    offset = info.header_offset + 30 + int(name_bytes) + int(extra_bytes)
    if offset + info.file_size > os.stat(path).st_size:
        raise SourceError(f"{path}: truncated")
    return offset


_SAFETENSORS_DTYPES = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip


def _open_safetensors(path: Path) -> dict[str, StoredArray]:
    try:
        tensors = read_header(path)
    except SafetensorsError as error:
        raise SourceError(f"{path}: {error}") from None
    return {
        name: StoredArray(path, t.shape, np.dtype(_SAFETENSORS_DTYPES[t.dtype]), t.dtype == "BF16", offset=t.offset)
        for name, t in tensors.items()
        if t.dtype in _SAFETENSORS_DTYPES
    }


OPENERS: dict[str, Callable[[Path], dict[str, StoredArray]]] = {
    ".npy": _open_npy,
    ".npz": _open_npz,
    ".safetensors": _open_safetensors,
}


def _arrays(spec: str) -> tuple[dict[str, StoredArray], str | None]:
    path, name = Path(spec), None
    if not path.exists() and ":" in spec:
        head, _, name = spec.rpartition(":")
        path = Path(head)
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    if path.suffix not in OPENERS:
        raise SourceError(
            f"{path}: cannot import {path.suffix or 'a file without a suffix'}; know {', '.join(OPENERS)}"
        )
    return OPENERS[path.suffix](path), name


def _pick(spec: str, wanted: Callable[[StoredArray], bool], what: str) -> StoredArray:
    arrays, name = _arrays(spec)
    listing = ", ".join(f"{n or 'array'} {a.dtype_name}{list(a.shape)}" for n, a in arrays.items()) or "no arrays"
    if name is not None:
        if name not in arrays:
            raise SourceError(f"{spec}: no array named {name!r}; there is {listing}")
        fitting = [arrays[name]]
    else:
        fitting = [a for a in arrays.values() if wanted(a)]
    if len(fitting) > 1:
        raise SourceError(f"{spec}: holds several; name one as PATH:NAME: {listing}")
    if not fitting or not wanted(fitting[0]):
        raise SourceError(f"{spec}: expected {what}; there is {listing}")
    return fitting[0]


def open_matrix(spec: str) -> StoredArray:
    """The float matrix [rows, dim] that `spec` names, or the only one of its file."""
    matrix = _pick(spec, lambda a: len(a.shape) == 2 and a.is_float, "a matrix [rows, dim] of floats")
    if matrix.shape[0] == 0 or matrix.shape[1] == 0:
        raise SourceError(f"{spec}: has no rows or no columns: {list(matrix.shape)}")
    return matrix


def open_keys(spec: str, n_rows: int | None = None) -> StoredArray:
    """The integer vector that `spec` names, or the only one of its file; [n_rows] if that is given."""
    keys = _pick(spec, lambda a: len(a.shape) == 1 and a.dtype.kind in "iu" and not a.bfloat16, "a vector of integers")
    if n_rows is not None and keys.shape[0] != n_rows:
        raise SourceError(f"{spec}: {keys.shape[0]} keys for {n_rows} rows")
    return keys


def key_chunks(keys: StoredArray) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yields (first row, keys [n] int64). Raises SourceError on a key past int64."""
    for first, chunk in keys.chunks():
        if (
            chunk.dtype.kind == "u"
            and chunk.dtype.itemsize == 8
            and chunk.size
            and chunk.max() > np.iinfo(np.int64).max
        ):
            row = first + int(np.argmax(chunk > np.iinfo(np.int64).max))
            raise SourceError(f"{keys.path}: key at row {row} is past 2^63 - 1; keys are int64")
        yield first, np.require(chunk, np.int64, ["C", "A"])
