"""A version's files: written once, then immutable.

    manifest.json       what the rows are and how good, with the size and sha256 of every other file
    rows.safetensors    key_index U8[buckets, 64] and keys I64[rows], both absent when keys are 0..rows-1;
                        rows U8[rows, stride]; default_row F32[dim]

A writer works in a hidden directory of the table, fsyncs every file and the directory, and renames it to
the version's name: a directory with a version's name is always whole, or a delta (delta.py) from which
rows.safetensors is made when it is first needed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embedserve.quant import key_index
from embedserve.quant.errors import ArtifactError, EmbedserveError
from embedserve.quant.kernels import _native
from embedserve.quant.rows import Calibration, Metric, RowFormat, RowType, Scheme
from embedserve.quant.safetensors_file import SafetensorsError, Tensor, build_header, read_header

SCHEMA = 2  # 1 has no xxh3 and no upserts
MANIFEST = "manifest.json"
ROWS_FILE = "rows.safetensors"
INDEX_FILE = "index.faiss"
MAX_MANIFEST_BYTES = 4 << 20
MAX_DIM = 65_536
VERSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
PARTIAL_PREFIX = ".partial-"
SYNC_BYTES = 64 << 20


class FileEntry(BaseModel):
    """A file's size and hashes: sha256 is checked at publish, xxh3 (64 bits, ten times as fast) at every reload."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    xxh3: str | None = Field(None, pattern="^[0-9a-f]{16}$")


class UpsertMark(BaseModel):
    """Which upserts are older than a version: segments 1 to `through` of the log `log` (upsert_log.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    log: str
    through: int = Field(ge=0)


class Quality(BaseModel):
    """The stored rows against their source. Recall is on sampled rows as queries, themselves left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    mean_cosine: float
    mse: float
    max_error: float
    max_abs: float = Field(ge=0, description="largest magnitude in the source")
    recall_at_10: float | None = None
    recall_queries: int = 0
    recall_rows: int = 0
    nonfinite_zeroed: int = 0


class IndexFigures(BaseModel):
    """An index over a version's rows, in index.faiss: what it is, how it is searched, and what it was measured to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    spec: str = Field(description="FAISS index factory string")
    oversample: int = Field(ge=1, description="candidates for each result, ranked by the table's own rows")
    nprobe: int = Field(0, ge=0)
    ef_search: int = Field(0, ge=0)
    recall: float = Field(ge=0, le=1, description="of the exact top k of the same rows, on queries not tuned by")
    target: float = Field(ge=0, le=1)
    k: int = Field(ge=1)
    queries: str = Field(description="where the queries came from")
    us_a_query: float = Field(ge=0, description="one thread, when it was built")
    exact_us_a_query: float = Field(ge=0)
    faiss: str = Field(description="version that wrote the file")


class Manifest(BaseModel):
    """manifest.json, schemas 1 and 2. Unknown fields are refused: a newer schema has another number."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal[1, 2] = Field(alias="schema")
    table: str
    version: str = Field(pattern=f"^{VERSION_NAME.pattern}$")
    created: str
    rows: int = Field(ge=1, lt=2**48)
    dim: int = Field(ge=1, le=MAX_DIM)
    row_type: RowType
    wide: bool
    scheme: Scheme
    calibration: Calibration
    metric: Metric
    keys: Literal["positions", "int64"]
    key_seed: int = Field(default=0, ge=0, lt=2**63)
    parent: str | None = None
    upserts: UpsertMark | None = None
    source: str = ""
    source_dtype: str = ""
    quality: Quality
    index: IndexFigures | None = None
    files: dict[str, FileEntry]

    @property
    def format(self) -> RowFormat:
        return RowFormat(self.row_type, self.wide, self.dim)

    @property
    def has_keys(self) -> bool:
        return self.keys == "int64"

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def rows_layout(fmt: RowFormat, rows: int, with_keys: bool) -> tuple[bytes, dict[str, Tensor]]:
    """Header and places of rows.safetensors."""
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    if with_keys:
        arrays["key_index"] = ("U8", (key_index.bucket_count(rows), key_index.BUCKET_BYTES))
        arrays["keys"] = ("I64", (rows,))
    arrays["rows"] = ("U8", (rows, fmt.stride))
    arrays["default_row"] = ("F32", (fmt.dim,))
    return build_header(arrays)


def read_manifest(directory: Path, name: str | None = None) -> Manifest:
    """Reads and checks the manifest of a version, called as its folder is unless `name` says otherwise ("" for any).

    Raises ArtifactError.
    """
    path = directory / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{path}: {path.stat().st_size} bytes; not a manifest")
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{directory}: no {MANIFEST}; not a version of a table") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ArtifactError(f"{path}: {where}: {first['msg']}") from None
    expected = directory.name if name is None else name
    if expected and manifest.version != expected:
        raise ArtifactError(f"{path}: says version {manifest.version}, but lies in {directory.name}")
    for file in manifest.files:
        if "/" in file or file.startswith("."):
            raise ArtifactError(f"{path}: file name {file!r} is not one of an artifact")
    if ROWS_FILE not in manifest.files:
        raise ArtifactError(f"{path}: lists no {ROWS_FILE}")
    if (manifest.index is None) != (INDEX_FILE not in manifest.files):
        raise ArtifactError(
            f"{path}: names an index and lists no {INDEX_FILE}, or lists it and does not say what it is"
        )
    return manifest


class Artifact:
    """An open version: its manifest and its arrays, mapped read-only from the page cache.

    rows uint8 [rows, stride]; keys int64 [rows] or None; key_index uint8 or None; default_row float32 [dim].
    """

    def __init__(self, directory: Path, verify: bool = False) -> None:
        """Checks sizes and headers always, every byte's sha256 with `verify`. Raises ArtifactError."""
        self.directory = directory
        self.manifest = manifest = read_manifest(directory)
        for name, entry in manifest.files.items():
            _check_file(directory / name, entry, verify)
        path = directory / ROWS_FILE
        _, expected = rows_layout(manifest.format, manifest.rows, manifest.has_keys)
        try:
            found = read_header(path)
        except SafetensorsError as error:
            raise ArtifactError(f"{path}: {error}") from None
        if found != expected:
            raise ArtifactError(f"{path}: arrays {_shapes(found)} are not those of the manifest, {_shapes(expected)}")
        self.places = found
        with open(path, "rb") as file:
            self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.rows: npt.NDArray[np.uint8] = self._array(found["rows"], np.dtype(np.uint8))
        self.keys: npt.NDArray[np.int64] | None = None
        self.key_index: npt.NDArray[np.uint8] | None = None
        if manifest.has_keys:
            self.keys = self._array(found["keys"], np.dtype("<i8"))
            self.key_index = self._array(found["key_index"], np.dtype(np.uint8))
        self.default_row: npt.NDArray[np.float32] = self._array(found["default_row"], np.dtype("<f4"))

    def _array(self, tensor: Tensor, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        flat = np.frombuffer(self.mapping, dtype, tensor.nbytes // dtype.itemsize, tensor.offset)
        return flat.reshape(tensor.shape)

    @property
    def rows_entry(self) -> FileEntry:
        return self.manifest.files[ROWS_FILE]

    @property
    def rows_path(self) -> Path:
        return self.directory / ROWS_FILE

    def sample_keys(self, n: int) -> npt.NDArray[np.int64]:
        """Keys of at most n rows, spread over the version."""
        positions = np.unique(np.linspace(0, self.manifest.rows - 1, min(n, self.manifest.rows)).astype(np.int64))
        return positions if self.keys is None else np.ascontiguousarray(self.keys[positions])

    def native_table(
        self, rows: npt.NDArray[np.uint8] | None = None, upserts: _native.Table | None = None
    ) -> _native.Table:
        """The kernels' view of this version, over `rows` if given (a copy elsewhere in memory), behind `upserts`."""
        fmt = self.manifest.format
        return _native.Table(
            self.rows if rows is None else rows,
            fmt.dim,
            fmt.type.native,
            fmt.wide,
            self.key_index,
            self.manifest.key_seed,
            upserts=upserts,
        )


def _shapes(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {t.dtype}{list(t.shape)} at {t.offset}" for name, t in tensors.items())


def _check_file(path: Path, entry: FileEntry, verify: bool) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ArtifactError(f"{path}: missing, though the manifest lists it") from None
    if size != entry.bytes:
        raise ArtifactError(f"{path}: {size} bytes, but the manifest says {entry.bytes}")
    if not verify:
        return
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(8 << 20):
            digest.update(block)
    if digest.hexdigest() != entry.sha256:
        raise ArtifactError(f"{path}: its bytes are not those that were written (sha256 {digest.hexdigest()})")


class ArtifactWriter:
    """Writes one version of a table in order: `append` the bytes of rows.safetensors, then `commit`.

    A context manager: leaving it without `commit`, for any reason, removes what was written. What a killed
    writer left behind is removed by the next one (it holds a lock while it lives).
    """

    def __init__(self, table_directory: Path) -> None:
        table_directory.mkdir(parents=True, exist_ok=True)
        self._table_directory = table_directory
        _remove_abandoned(table_directory)
        self._directory = table_directory / f"{PARTIAL_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        self._directory.mkdir()
        self._lock = os.open(self._directory, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._file = -1
        self._whole: dict[str, FileEntry] = {}  # files that are not written by `append`
        self._digest, self._xxh3 = hashlib.sha256(), xxhash.xxh3_64()
        self._size = self._synced = 0
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._sync: Future[None] | None = None

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._syncer.shutdown()
        if self._file >= 0:
            os.close(self._file)
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)

    def begin_rows(self, total_bytes: int) -> None:
        """Starts rows.safetensors anew, with its disk space reserved. Raises EmbedserveError when there is too little."""
        if self._file >= 0:
            self._finish_sync()
            os.close(self._file)
        self._file = os.open(self._directory / ROWS_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._digest, self._xxh3, self._size, self._synced = hashlib.sha256(), xxhash.xxh3_64(), 0, 0
        try:
            os.posix_fallocate(self._file, 0, total_bytes)
        except OSError as error:
            raise self._explained(error, total_bytes) from error

    def append(self, data: Any) -> None:
        """Writes the next bytes of rows.safetensors."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._xxh3.update(view)
        self._size += len(view)
        while view:
            try:
                view = view[os.write(self._file, view) :]
            except OSError as error:
                raise self._explained(error, len(view)) from error
        # The disk works while the next rows are encoded, so that little is left to wait for at the end.
        if self._size - self._synced >= SYNC_BYTES and (self._sync is None or self._sync.done()):
            self._finish_sync()
            self._synced = self._size
            self._sync = self._syncer.submit(os.fdatasync, self._file)

    def _finish_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()
            self._sync = None

    def rows_of(self, other: Artifact) -> None:
        """Takes the rows of another version as they are, without their bytes where the file system can link them."""
        source, target = other.directory / ROWS_FILE, self._directory / ROWS_FILE
        try:
            os.link(source, target)
        except OSError:
            self._copy(source)
        self._whole[ROWS_FILE] = other.rows_entry

    def add_file(self, name: str, data: Any) -> None:
        """Writes a whole file beside the rows."""
        view = memoryview(data).cast("B")
        try:
            write_durably(self._directory / name, view)
        except OSError as error:
            raise self._explained(error, len(view)) from error
        self._whole[name] = FileEntry(
            bytes=len(view), sha256=hashlib.sha256(view).hexdigest(), xxh3=xxhash.xxh3_64_hexdigest(view)
        )

    def commit(self, version: str, manifest: dict[str, Any]) -> Manifest:
        """Completes the files and gives the directory its name. Raises FileExistsError if the version exists."""
        files = dict(self._whole)
        if ROWS_FILE not in files:
            self._finish_sync()
            os.fsync(self._file)
            files[ROWS_FILE] = FileEntry(bytes=self._size, sha256=self._digest.hexdigest(), xxh3=self._xxh3.hexdigest())
        created = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        document = Manifest.model_validate(
            {**manifest, "schema": SCHEMA, "version": version, "created": created, "files": files}
        )
        write_durably(self._directory / MANIFEST, document.model_dump_json(by_alias=True, indent=1).encode() + b"\n")
        os.fsync(self._lock)
        self._rename(version)
        return document

    def commit_rows(self, manifest: Manifest) -> None:
        """Completes the rows of a version whose directory is there without them. Raises ArtifactError unless they are its own."""
        self._finish_sync()
        os.fsync(self._file)
        if self._digest.hexdigest() != manifest.files[ROWS_FILE].sha256:
            raise ArtifactError(
                f"{self._table_directory / manifest.version}: what its delta gives are not its rows (sha256)"
            )
        final = self._table_directory / manifest.version
        os.replace(self._directory / ROWS_FILE, final / ROWS_FILE)
        sync_directory(final)

    def commit_copy(self, version: str, sources: Iterable[Path]) -> None:
        """Gives copies of finished files the version's name. Raises FileExistsError if the version exists."""
        for source in sources:
            self._copy(source)
        os.fsync(self._lock)
        self._rename(version)

    def _copy(self, source: Path) -> None:
        try:
            shutil.copyfile(source, self._directory / source.name)
        except OSError as error:
            raise self._explained(error, source.stat().st_size) from error
        fd = os.open(self._directory / source.name, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _rename(self, version: str) -> None:
        final = self._table_directory / version
        if final.exists():
            raise FileExistsError(str(final))
        try:
            os.rename(self._directory, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(str(final)) from error
            raise
        sync_directory(self._table_directory)

    def _explained(self, error: OSError, wanted: int) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(self._table_directory).free
            return EmbedserveError(
                f"{self._table_directory}: no space for {wanted:,} more bytes ({free:,} free): {error.strerror}; nothing was published"
            )
        return error


def _remove_abandoned(table_directory: Path) -> None:
    for path in table_directory.glob(f"{PARTIAL_PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            continue  # another writer was quicker; or a publisher's file, which the next one replaces
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(lock)


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Creates a file and waits until its bytes are on disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
