"""Rows written since a version was made: a write-ahead log beside a table's versions.

ROOT/TABLE/upserts/00000001.log …       segments, read in order; the last one grows

    segment   "ESUPSERT" · log id, 16 hex digits · uint32 segment · uint32 crc32 of what stands before it
    record    "ESUR" · uint32 payload bytes · uint32 crc32 of the payload · uint32 crc32 of these 12 bytes
    payload   uint32 n · uint32 dim · int64 keys[n] · float32 values[n, dim]        (little-endian)

Writers take turns by a lock on the folder, so several servers may share a log; each reads what the others
wrote. A record counts once it is on disk as a whole. A last record that is cut short was never
acknowledged, and the next writer removes it; any other record that is not as it was written is damage:
what stands before it is read, and the log takes no more until it is mended.

A version made while there is a log begins a new segment (`rotate`) and names in its manifest the segments
that are older than itself: upserts in those are folded into it, later ones lie over it.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embedserve.quant.artifact import UpsertMark, sync_directory, write_durably
from embedserve.quant.errors import ArtifactError, ResourceExhausted

FOLDER = "upserts"
_SEGMENT_NAME = re.compile(r"(\d{8})\.log")
_SEGMENT = struct.Struct("<8s16sII")
_RECORD = struct.Struct("<4sIII")
_SHAPE = struct.Struct("<II")
_SEGMENT_MAGIC, _RECORD_MAGIC = b"ESUPSERT", b"ESUR"


@dataclass(frozen=True)
class Upserts:
    """Rows by key: keys int64 [n], values float32 [n, dim]; a later row of a key replaces an earlier one."""

    keys: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]

    @property
    def dim(self) -> int:
        return int(self.values.shape[1])


@dataclass(frozen=True, order=True)
class Place:
    """How far a reader has come; the default is the very beginning."""

    segment: int = 0
    offset: int = 0


@dataclass
class Read:
    """What was read: batches in order, where reading goes on, and what stopped it for good, if anything."""

    place: Place
    batches: list[Upserts] = field(default_factory=list)
    damage: str | None = None


class UpsertLog:
    """One table's log. Every call looks at the disk anew; safe between processes."""

    def __init__(self, table_directory: Path) -> None:
        self.directory = table_directory / FOLDER

    def segments(self) -> list[int]:
        """Numbers of the segments, ascending."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(_SEGMENT_NAME.fullmatch, names) if match)

    def identity(self) -> str | None:
        """The log's id, by which a version tells its own log from another catalog's; None before the first upsert."""
        segments = self.segments()
        if not segments:
            return None
        with open(self._path(segments[0]), "rb") as file:
            return _segment_id(self._path(segments[0]), file.read(_SEGMENT.size))

    def begin(self, mark: UpsertMark | None) -> Place:
        """Where the upserts begin that lie over a version with this mark."""
        if mark is None or mark.log != self.identity():
            return Place()
        return Place(mark.through + 1, _SEGMENT.size)

    def read(self, place: Place, through: int | None = None) -> Read:
        """Everything from `place` on, to the end of segment `through` if given. Takes no lock: a record that is being written is left for the next time."""
        read = Read(place)
        while read.damage is None:
            segments = [s for s in self.segments() if s >= read.place.segment and (through is None or s <= through)]
            if not segments:
                break
            segment = segments[0]
            offset = read.place.offset if segment == read.place.segment else _SEGMENT.size
            try:
                self._read_segment(segment, offset, read)
            except FileNotFoundError:
                continue  # trimmed between two looks
            if len(segments) == 1 or read.damage:
                break
            read.place = Place(segments[1], _SEGMENT.size)
        return read

    def extent(self) -> Place:
        """Where the log ends; looks at a size only."""
        segments = self.segments()
        try:
            return Place(segments[-1], self._path(segments[-1]).stat().st_size) if segments else Place()
        except FileNotFoundError:
            return Place()

    def append(self, batches: Sequence[Upserts], known: Place) -> None:
        """Writes the batches, one record each, and waits until they are on disk.

        `known`: how far the caller has read; what lies behind is not checked again. Raises ResourceExhausted
        when the disk is full and ArtifactError when the log is damaged; then none of the batches is in it.
        """
        data = b"".join(map(_record, batches))
        self.directory.mkdir(exist_ok=True)
        with self._locked():
            segments = self.segments() or [self._create(1, os.urandom(8).hex())]
            path = self._path(segments[-1])
            read = Read(
                Place(
                    segments[-1], max(known.offset, _SEGMENT.size) if known.segment == segments[-1] else _SEGMENT.size
                )
            )
            self._read_segment(segments[-1], read.place.offset, read)
            if read.damage:
                raise ArtifactError(f"{read.damage}; no upserts are taken until it is folded or mended")
            fd = os.open(path, os.O_RDWR)
            try:
                os.ftruncate(fd, read.place.offset)  # a killed writer's unfinished record
                try:
                    _write_at(fd, data, read.place.offset)
                    os.fdatasync(fd)
                except OSError as error:
                    os.ftruncate(fd, read.place.offset)
                    raise ResourceExhausted(
                        f"{path}: cannot write {len(data):,} bytes: {error.strerror}; nothing of this was stored"
                    ) from error
            finally:
                os.close(fd)

    def rotate(self) -> UpsertMark | None:
        """Begins a new segment if the last one holds anything; returns the mark of what is older. None without a log."""
        identity = self.identity()
        if identity is None:
            return None
        with self._locked():
            last = self.segments()[-1]
            if self._path(last).stat().st_size > _SEGMENT.size:
                last = self._create(last + 1, identity)
            return UpsertMark(log=identity, through=last - 1)

    def trim(self, through: int) -> None:
        """Removes segments up to `through`, but never the last one."""
        with self._locked():
            for segment in self.segments()[:-1]:
                if segment <= through:
                    self._path(segment).unlink(missing_ok=True)

    def _path(self, segment: int) -> Path:
        return self.directory / f"{segment:08d}.log"

    def _create(self, segment: int, identity: str) -> int:
        head = _SEGMENT.pack(_SEGMENT_MAGIC, identity.encode(), segment, 0)[:-4]
        partial = self.directory / ".partial"
        write_durably(partial, head + zlib.crc32(head).to_bytes(4, "little"))
        os.replace(partial, self._path(segment))
        sync_directory(self.directory)
        return segment

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # a killed writer's lock is gone with it
            yield
        finally:
            os.close(fd)

    def _read_segment(self, segment: int, offset: int, read: Read) -> None:
        path = self._path(segment)
        with open(path, "rb") as file:
            head = file.read(_SEGMENT.size)
            try:
                _segment_id(path, head)
            except ArtifactError as error:
                read.damage = str(error)
                return
            file.seek(offset)
            data = memoryview(file.read())
        at = 0
        while at < len(data):
            end = _record_end(data, at)
            if end is None:
                read.damage = (
                    f"{path}: damaged at byte {offset + at}: {len(data) - at:,} bytes from there on are not read"
                )
                break
            if end > len(data):
                break  # cut short, or still being written
            batch = _batch(data[at + _RECORD.size : end], data[at : at + _RECORD.size])
            if batch is None and end < len(data):
                read.damage = (
                    f"{path}: damaged at byte {offset + at}: {len(data) - at:,} bytes from there on are not read"
                )
            if batch is None:
                break
            read.batches.append(batch)
            at = end
        read.place = Place(segment, offset + at)


def latest(batches: Sequence[Upserts], dim: int) -> Upserts:
    """The last row of every key, ascending by key; batches of another dim are left out."""
    fitting = [batch for batch in batches if batch.dim == dim]
    if not fitting:
        return Upserts(np.empty(0, np.int64), np.empty((0, dim), np.float32))
    keys = np.concatenate([batch.keys for batch in fitting])
    values = np.concatenate([batch.values for batch in fitting])
    distinct, from_end = np.unique(keys[::-1], return_index=True)
    return Upserts(distinct, values[len(keys) - 1 - from_end])


def _segment_id(path: Path, head: bytes) -> str:
    if len(head) == _SEGMENT.size:
        magic, identity, _, crc = _SEGMENT.unpack(head)
        if magic == _SEGMENT_MAGIC and crc == zlib.crc32(head[:-4]):
            return str(identity.decode("ascii", "replace"))
    raise ArtifactError(f"{path}: is no segment of an upsert log, or damaged in its head")


def _record(batch: Upserts) -> bytes:
    payload = b"".join(
        (_SHAPE.pack(*batch.values.shape), batch.keys.astype("<i8").tobytes(), batch.values.astype("<f4").tobytes())
    )
    head = _RECORD.pack(_RECORD_MAGIC, len(payload), zlib.crc32(payload), 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little") + payload


def _record_end(data: memoryview, at: int) -> int | None:
    """Where the record at `at` ends, past the data if it is cut short; None if it is not a record."""
    if len(data) - at < _RECORD.size:
        return len(data) + 1
    head = data[at : at + _RECORD.size]
    magic, length, _, crc = _RECORD.unpack(head)
    if magic == _RECORD_MAGIC and crc == zlib.crc32(head[:-4]):
        return at + _RECORD.size + int(length)
    # A machine that lost power may leave a file longer than what was written to it, filled with zeros.
    return len(data) + 1 if not any(data[at:]) else None


def _batch(payload: memoryview, head: memoryview) -> Upserts | None:
    if zlib.crc32(payload) != _RECORD.unpack(head)[2]:
        return None
    n, dim = _SHAPE.unpack_from(payload)
    if len(payload) != _SHAPE.size + n * (8 + 4 * dim) or not dim:
        return None
    keys = np.frombuffer(payload, "<i8", n, _SHAPE.size)
    values = np.frombuffer(payload, "<f4", n * dim, _SHAPE.size + 8 * n)
    return Upserts(keys.astype(np.int64), values.reshape(n, dim).astype(np.float32))


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n
