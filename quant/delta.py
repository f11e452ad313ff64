"""Deltas: what a version changed since another, small enough to send every hour.

A delta's folder holds the manifest of the version that it gives, and

    delta.json           which version it changes, what it holds, size and sha256 of the other file
    delta.safetensors    arrays, each a zstd frame as U8[bytes]:
        literals   int64, the first position and then the steps to the next: rows that are not copied
        rows       uint8 [literals, stride]
        keys       int64, of those literals whose key the base lacks, in order
        from, run  int64, runs of the result's rows: the base position that each begins at (-1: keys that the base
                   lacks) and its length; tables without keys have none, there a row lies where it lay
        default_row

and the version's index whole, if it has one: an index is small, and not made of parts that could be told apart.
The result's bytes are those of the version it was made from, to the bit: its manifest's sha256 is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import numpy.typing as npt
import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embedserve.quant import key_index
from embedserve.quant.artifact import (
    INDEX_FILE,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    ROWS_FILE,
    Artifact,
    ArtifactWriter,
    FileEntry,
    Manifest,
    read_manifest,
    rows_layout,
    sync_directory,
    write_durably,
)
from embedserve.quant.errors import ArtifactError, FailedPrecondition
from embedserve.quant.safetensors_file import SafetensorsError, Tensor, build_header, read_header

DELTA_MANIFEST, DELTA_FILE = "delta.json", "delta.safetensors"
MAX_CHAIN = 16
SECTIONS = ("literals", "rows", "keys", "from", "run", "default_row")
CHUNK_BYTES = 8 << 20
ZSTD_LEVEL = 3

Positions = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]
Progress = Callable[[int], None]


class DeltaManifest(BaseModel):
    """delta.json, schema 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal[1] = Field(alias="schema")
    base: str
    base_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    changed: int = Field(ge=0, description="rows of a key that both have")
    appeared: int = Field(ge=0)
    vanished: int = Field(ge=0)
    file: FileEntry


def is_bare(directory: Path) -> bool:
    """Whether a version's folder holds a delta and no rows yet."""
    return (directory / DELTA_MANIFEST).is_file() and not (directory / ROWS_FILE).exists()


def read_delta(directory: Path) -> DeltaManifest:
    """Raises ArtifactError if there is none, or it is damaged."""
    path = directory / DELTA_MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{path}: {path.stat().st_size} bytes; not the manifest of a delta")
        return DeltaManifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{directory}: neither rows nor a delta; not a version of a table") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(f"{path}: {'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}") from None


@dataclass(frozen=True)
class _Changes:
    """How rows [first, first + n) of the new version come out of the old one."""

    old_positions: Positions  # [n], -1 where the old version has no such key
    literal: npt.NDArray[np.bool_]  # [n]


def compare(old: Artifact, new: Artifact) -> Iterator[tuple[int, _Changes]]:
    """Yields (first position, changes) over the new version's rows, some megabytes at a time.

    Raises FailedPrecondition if their rows are not of one format.
    """
    a, b = old.manifest, new.manifest
    if (a.format, a.has_keys) != (b.format, b.has_keys):
        raise FailedPrecondition(
            f"{a.table} {a.version} and {b.version} differ in row type, dim or kind of keys; publish the new version in full"
        )
    table = old.native_table()
    step = max(1, CHUNK_BYTES // b.format.stride)
    for first in range(0, b.rows, step):
        rows = new.rows[first : first + step]
        ids = (
            np.arange(first, first + len(rows))
            if new.keys is None
            else np.ascontiguousarray(new.keys[first : first + step])
        )
        positions = np.empty(len(rows), np.int64)
        table.find(ids, positions)
        literal = positions < 0
        there = np.flatnonzero(~literal)
        before = positions[there]
        # A run of the base is a view of it; anything else is copied row by row.
        consecutive = len(before) and before[-1] - before[0] == len(before) - 1 and (np.diff(before) == 1).all()
        base = old.rows[before[0] : before[-1] + 1] if consecutive else old.rows[before]
        here = rows if len(there) == len(rows) else rows[there]
        literal[there] = (_words(base) != _words(here)).any(axis=1)
        yield first, _Changes(positions, literal)


def _words(rows: Rows) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(rows).view(np.uint32)  # strides are multiples of 4


def changed_fraction(old: Artifact, new: Artifact) -> float:
    """Rows changed, appeared and vanished, over the larger version's rows; 1.0 where the formats differ."""
    try:
        kept = sum(int(np.count_nonzero(~changes.literal)) for _, changes in compare(old, new))
    except FailedPrecondition:
        return 1.0
    return 1 - kept / max(old.manifest.rows, new.manifest.rows)


class _Section:
    """One compressed array, on disk while the others grow."""

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (see close)
        self._stream = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
        self.size = 0

    def add(self, array: npt.NDArray[Any]) -> None:
        self._keep(self._stream.compress(np.ascontiguousarray(array).data))

    def finish(self) -> IO[bytes]:
        self._keep(self._stream.flush())
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        self._file.close()

    def _keep(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)


def make_delta(old: Artifact, new: Artifact, folder: Path, progress: Progress = lambda rows: None) -> DeltaManifest:
    """Writes into `folder`, which must not exist yet, the delta from one version of a table to another.

    Raises FailedPrecondition if their rows are not of one format, FileExistsError.
    """
    folder.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as stack:
            sections = {name: stack.enter_context(contextlib.closing(_Section(folder))) for name in SECTIONS}
            counts = _fill(sections, old, new, progress)
            entry = _write_sections(sections, folder / DELTA_FILE)
        document = DeltaManifest(
            schema=1, base=old.manifest.version, base_sha256=old.rows_entry.sha256, file=entry, **counts
        )
        if new.manifest.index:
            write_durably(folder / INDEX_FILE, (new.directory / INDEX_FILE).read_bytes())
        write_durably(folder / MANIFEST, (new.directory / MANIFEST).read_bytes())
        write_durably(folder / DELTA_MANIFEST, document.model_dump_json(by_alias=True, indent=1).encode() + b"\n")
        sync_directory(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return document


def _fill(sections: dict[str, _Section], old: Artifact, new: Artifact, progress: Progress) -> dict[str, int]:
    appeared = changed = last = 0
    for first, changes in compare(old, new):
        positions = changes.old_positions
        literals = np.flatnonzero(changes.literal)
        sections["rows"].add(new.rows[first + literals])
        sections["literals"].add(np.diff(first + literals, prepend=last))
        last = int(first + literals[-1]) if len(literals) else last
        absent = positions < 0
        appeared += int(np.count_nonzero(absent))
        changed += int(np.count_nonzero(changes.literal & ~absent))
        if new.keys is not None:
            sections["keys"].add(new.keys[first + np.flatnonzero(absent)])
            breaks = np.diff(positions) != np.where(absent[:-1], 0, 1)
            starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
            sections["from"].add(positions[starts])
            sections["run"].add(np.diff(starts, append=len(positions)))
        progress(first + len(positions))
    sections["default_row"].add(new.default_row)
    return {"changed": changed, "appeared": appeared, "vanished": old.manifest.rows - (new.manifest.rows - appeared)}


def _write_sections(sections: dict[str, _Section], path: Path) -> FileEntry:
    files = {name: section.finish() for name, section in sections.items()}
    header, _ = build_header({name: ("U8", (section.size,)) for name, section in sections.items()})
    digest, size = hashlib.sha256(header), len(header)
    with open(path, "xb") as out:
        out.write(header)
        for file in files.values():
            while block := file.read(1 << 20):
                out.write(block)
                digest.update(block)
                size += len(block)
        out.flush()
        os.fsync(out.fileno())
    return FileEntry(bytes=size, sha256=digest.hexdigest(), xxh3=None)


def apply_delta(folder: Path, writer: Callable[[str], ArtifactWriter]) -> None:
    """Makes rows.safetensors in a version's folder from its delta and the base version beside it.

    Raises ArtifactError if the delta or its base is missing, damaged, or not what the other was made for;
    nothing is changed then.
    """
    manifest, delta = read_manifest(folder), read_delta(folder)
    try:
        base = Artifact(folder.parent / delta.base)
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: changes version {delta.base}, which cannot be read: {error}") from None
    if base.rows_entry.sha256 != delta.base_sha256:
        raise ArtifactError(f"{folder}: was made for another version named {delta.base} than is here")
    if (base.manifest.format, base.manifest.has_keys) != (manifest.format, manifest.has_keys):
        raise ArtifactError(f"{folder}: its rows are of another format than those of {delta.base}")
    with writer(manifest.table) as out:
        _Rebuild(folder, manifest, base).write(out)
        out.commit_rows(manifest)


class _Part(io.RawIOBase):
    """One array's bytes in a file: the decompressor would read on past an empty frame into the next array."""

    def __init__(self, path: Path, tensor: Tensor) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 (closed with this)
        self._file.seek(tensor.offset)
        self._left = tensor.nbytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


class _Rebuild:
    """The rows of a version out of its delta and its base."""

    def __init__(self, folder: Path, manifest: Manifest, base: Artifact) -> None:
        self._folder, self._manifest, self._base = folder, manifest, base
        self._tensors = self._checked_tensors()
        literals = np.cumsum(self._array("literals", np.int64))
        if len(literals) and (literals[0] < 0 or literals[-1] >= manifest.rows or (np.diff(literals) <= 0).any()):
            raise self._damaged("literals out of order or range")
        self._literals: Positions = literals
        self._runs = self._checked_runs()
        self._keys = self._array("keys", np.int64)
        if len(self._keys) != int(self._runs[1][self._runs[0] < 0].sum()):
            raise self._damaged("keys and runs do not agree")

    def write(self, out: ArtifactWriter) -> None:
        manifest = self._manifest
        header, layout = rows_layout(manifest.format, manifest.rows, manifest.has_keys)
        out.begin_rows(layout["default_row"].offset + layout["default_row"].nbytes)
        out.append(header)
        if manifest.has_keys:
            if not key_index.build(manifest.rows, self._key_chunks, manifest.key_seed, out.append):
                raise self._damaged("its seed does not spread its keys")
            for _, keys in self._key_chunks():
                out.append(keys)
        for rows in self._row_chunks():
            out.append(rows)
        default_row = self._array("default_row", np.float32)
        if len(default_row) != manifest.dim:
            raise self._damaged("default_row of another dim")
        out.append(default_row)

    def _old_positions(self) -> Iterator[tuple[int, Positions]]:
        """(first, base positions [n] of the new rows from `first` on), -1 where the base has no such key."""
        rows, step = self._manifest.rows, max(1, CHUNK_BYTES // self._manifest.format.stride)
        if not self._manifest.has_keys:
            for first in range(0, rows, step):
                positions = np.arange(first, min(first + step, rows))
                positions[positions >= self._base.manifest.rows] = -1
                yield first, positions
            return
        starts, lengths = self._runs
        ends = np.cumsum(lengths)
        for first in range(0, rows, step):
            places = np.arange(first, min(first + step, rows))
            run = np.searchsorted(ends, places, side="right")
            offsets = places - (ends[run] - lengths[run])
            yield first, np.where(starts[run] < 0, -1, starts[run] + offsets)

    def _key_chunks(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        assert self._base.keys is not None
        taken = 0
        for first, positions in self._old_positions():
            absent = np.flatnonzero(positions < 0)
            keys = self._base.keys[np.maximum(positions, 0)]
            keys[absent] = self._keys[taken : taken + len(absent)]
            taken += len(absent)
            yield first, keys

    def _row_chunks(self) -> Iterator[Rows]:
        stride = self._manifest.format.stride
        with self._stream("rows") as stream:
            for first, positions in self._old_positions():
                rows = self._base.rows[np.maximum(positions, 0)]
                lo, hi = np.searchsorted(self._literals, (first, first + len(rows)))
                literal = self._read(stream, (int(hi) - int(lo)) * stride)
                places = self._literals[lo:hi] - first
                rows[places] = np.frombuffer(literal, np.uint8).reshape(-1, stride)
                absent = positions < 0
                absent[places] = False
                if absent.any():
                    raise self._damaged("a row has neither bytes nor a base")
                yield rows

    def _checked_tensors(self) -> dict[str, Tensor]:
        path, entry = self._folder / DELTA_FILE, read_delta(self._folder).file
        try:
            with open(path, "rb") as file:
                digest = hashlib.sha256()
                while block := file.read(1 << 20):
                    digest.update(block)
            if path.stat().st_size != entry.bytes or digest.hexdigest() != entry.sha256:
                raise ArtifactError(f"{path}: its bytes are not those that were written")
            tensors = read_header(path)
        except FileNotFoundError:
            raise ArtifactError(f"{path}: missing") from None
        except SafetensorsError as error:
            raise ArtifactError(f"{path}: {error}") from None
        if set(tensors) != set(SECTIONS):
            raise ArtifactError(f"{path}: holds {', '.join(sorted(tensors))}; not a delta")
        return tensors

    def _checked_runs(self) -> tuple[Positions, Positions]:
        starts, lengths = self._array("from", np.int64), self._array("run", np.int64)
        if not self._manifest.has_keys:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        fits = len(starts) == len(lengths) and (lengths > 0).all() and lengths.sum() == self._manifest.rows
        if (
            not fits
            or (starts < -1).any()
            or (np.where(starts < 0, 0, starts + lengths) > self._base.manifest.rows).any()
        ):
            raise self._damaged("runs do not fit the two versions")
        return starts, lengths

    def _array(self, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        limit = 16 * (self._manifest.rows + self._manifest.dim + 1)
        with self._stream(name) as stream:
            try:
                data = stream.read(limit + 1)
            except zstandard.ZstdError as error:
                raise self._damaged(f"{name}: {error}") from None
        if len(data) > limit or len(data) % np.dtype(dtype).itemsize:
            raise self._damaged(f"{name} of {len(data)} bytes")
        return np.frombuffer(data, dtype)

    def _stream(self, name: str) -> zstandard.ZstdDecompressionReader:
        part = _Part(self._folder / DELTA_FILE, self._tensors[name])
        return zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", part), closefd=True)

    def _read(self, stream: zstandard.ZstdDecompressionReader, n_bytes: int) -> bytes:
        parts, left = [], n_bytes
        while left:
            try:
                part = stream.read(left)
            except zstandard.ZstdError as error:
                raise self._damaged(f"rows: {error}") from None
            if not part:
                raise self._damaged("rows end early")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _damaged(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self._folder / DELTA_FILE}: {what}; not a delta of {self._base.manifest.version}")
