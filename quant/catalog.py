"""A directory of tables and their versions.

ROOT/TABLE/CURRENT       one line: the current version; replaced atomically
ROOT/TABLE/VERSION/      an artifact (artifact.py)
"""

from __future__ import annotations

import fcntl
import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

from embedserve.quant.artifact import (
    MANIFEST,
    PARTIAL_PREFIX,
    VERSION_NAME,
    Artifact,
    ArtifactWriter,
    write_durably,
)
from embedserve.quant.errors import ArtifactError, InvalidArgument, NotFound

TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")
CURRENT = "CURRENT"
_TIME_FORMAT = "%Y%m%dT%H%M%SZ"
_TIME_NAME = re.compile(r"\d{8}T\d{6}Z")


def check_table_name(table: str) -> str:
    """Returns the name, or raises InvalidArgument: letters, digits, - and _ only, so that it is one folder's name."""
    if not TABLE_NAME.fullmatch(table):
        raise InvalidArgument(
            "table", f"{table[:200]!r} is no table name; allowed are 1 to 128 letters, digits, '-' and '_'"
        )
    return table


class Catalog:
    """The tables below one root. Reads see only whole versions; nothing is cached."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tables(self) -> list[str]:
        """Names of the tables that have a version, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(
            entry.name
            for entry in self.root.iterdir()
            if TABLE_NAME.fullmatch(entry.name) and self.versions(entry.name)
        )

    def versions(self, table: str) -> list[str]:
        """Names of a table's versions, oldest first."""
        directory = self.root / check_table_name(table)
        if not directory.is_dir():
            return []
        return sorted(
            e.name for e in directory.iterdir() if VERSION_NAME.fullmatch(e.name) and (e / MANIFEST).is_file()
        )

    def current(self, table: str) -> str | None:
        """The published version's name, or None before the first publish. Raises ArtifactError on a damaged CURRENT."""
        path = self.root / check_table_name(table) / CURRENT
        try:
            with open(path, "rb") as file:
                line = file.read(100).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return None
        if not VERSION_NAME.fullmatch(line):
            raise ArtifactError(f"{path}: {line!r} is not a version's name")
        return line

    def open(self, table: str, version: str = "", verify: bool = False) -> Artifact:
        """Opens a version, the current one by default. Raises NotFound or ArtifactError."""
        versions = self.versions(table)
        if not versions:
            raise NotFound(f"no table {table!r} in {self.root}; there is: {', '.join(self.tables()) or 'none'}")
        name = version or self.current(table)
        if name is None:
            raise NotFound(f"table {table!r} has no published version; publish one of: {', '.join(versions)}")
        if name not in versions:
            raise NotFound(f"table {table!r} has no version {name!r}; there is: {', '.join(versions)}")
        artifact = Artifact(self.root / table / name, verify)
        if artifact.manifest.table != table:
            raise ArtifactError(f"{artifact.directory}: its manifest is of table {artifact.manifest.table!r}")
        return artifact

    def writer(self, table: str) -> ArtifactWriter:
        """Begins a new version of a table."""
        return ArtifactWriter(self.root / check_table_name(table))

    def next_version(self, table: str) -> str:
        """A name for a new version: the time in UTC, or one second past the newest, whichever is later."""
        now = datetime.now(timezone.utc).replace(tzinfo=None)
        times = [name for name in self.versions(table) if _TIME_NAME.fullmatch(name)]
        if times:
            now = max(now, datetime.strptime(times[-1], _TIME_FORMAT) + timedelta(seconds=1))
        return now.strftime(_TIME_FORMAT)

    def publish(self, table: str, version: str = "") -> str:
        """Makes a version (the newest by default) current, after checking every byte of it. Returns its name."""
        versions = self.versions(table)
        name = version or (versions[-1] if versions else "")
        self.open(table, name, verify=True)
        directory = self.root / table
        partial = directory / f"{PARTIAL_PREFIX}current"
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one publisher at a time; a killed one's lock is gone with it
            write_durably(partial, name.encode() + b"\n")
            os.replace(partial, directory / CURRENT)
            os.fsync(lock)
        finally:
            os.close(lock)
        return name
