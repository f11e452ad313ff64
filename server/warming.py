"""Hot rows are in the pool before they are asked for: at a start those of before it, at a reload those of the version before.

What is hot is what the pool itself holds, most asked for first. It is written beside the table's versions
now and then, so that a server that starts finds it:

    ROOT/TABLE/hot_keys.npy    int64, at most MOST_KEYS
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embedserve.server.versions import ServedVersion

log = logging.getLogger(__name__)
FILE = "hot_keys.npy"
MOST_KEYS = 2_000_000
SHARE = 2  # a reload loads 1 of 2 cached keys: the version that answers meanwhile keeps its own


def warm_like(version: ServedVersion, before: ServedVersion) -> None:
    """Loads what is hot in one version into another of the same table."""
    if version.cached is None or before.cached is None:
        return
    keys = np.frombuffer(before.cached.hot_keys(MOST_KEYS), "<i8")
    _warm(version, keys[: len(keys) // SHARE])


def warm_from(version: ServedVersion, directory: Path) -> None:
    """Loads what was hot when a server last wrote it down."""
    if version.cached is None:
        return
    try:
        keys = np.load(directory / FILE, allow_pickle=False)
    except FileNotFoundError:
        return
    except (OSError, ValueError, EOFError) as error:
        log.warning("hot keys cannot be read: %s", error, extra={"table": version.manifest.table})
        return
    if keys.dtype != np.int64 or keys.ndim != 1:
        log.warning("hot keys are no int64 vector: %s", keys.dtype, extra={"table": version.manifest.table})
        return
    _warm(version, keys[:MOST_KEYS])


def save_hot_keys(version: ServedVersion, directory: Path) -> None:
    """Writes down what is hot; a catalog that cannot be written to is left as it is."""
    if version.cached is None:
        return
    partial = directory / f".partial-{FILE}-{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            np.save(file, np.frombuffer(version.cached.hot_keys(MOST_KEYS), "<i8"))
        os.replace(partial, directory / FILE)
    except OSError as error:
        log.debug("hot keys cannot be written: %s", error, extra={"table": version.manifest.table})
        with contextlib.suppress(OSError):
            partial.unlink()


def _warm(version: ServedVersion, keys: npt.NDArray[np.int64]) -> None:
    if version.cached is not None and len(keys):
        found = version.cached.warm(np.ascontiguousarray(keys))
        log.info("warmed", extra={"table": version.manifest.table, "version": version.name, "rows": found})
