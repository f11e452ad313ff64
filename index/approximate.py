"""A FAISS index that chooses candidates among a version's rows; the rows themselves rank them (search.py).

FAISS numbers what it holds by position, as rows are numbered, and nothing is ever removed from an index: a
version's rows never change, and what is upserted over them is searched beside it.
"""

from __future__ import annotations

import importlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from embedserve.index.threads import SearchThreads
from embedserve.quant import INDEX_FILE, Artifact, IndexFigures, Metric
from embedserve.quant.errors import ArtifactError

Vectors = npt.NDArray[np.float32]
MOST_BREADTH = 65_536  # FAISS allocates for what a request asks
_local = threading.local()


@dataclass(frozen=True)
class Params:
    """How hard a search tries; 0: as the index was tuned."""

    nprobe: int = 0
    ef_search: int = 0
    oversample: int = 0


def faiss() -> Any:
    """The module, loaded when an index is first needed. Raises ImportError when it is not installed."""
    # Idle OpenMP threads would otherwise spin for a while on cores that requests need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return importlib.import_module("faiss")


def prepared(vectors: Vectors, metric: Metric) -> Vectors:
    """Vectors as an index of this metric holds and takes them: of length 1 for cosine."""
    if metric is not Metric.COSINE:
        return vectors
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0))


class ApproximateIndex:
    """Safe for concurrent searches."""

    def __init__(self, index: Any, figures: IndexFigures, metric: Metric, threads: SearchThreads) -> None:
        self._faiss, self._index, self._metric, self._threads = faiss(), index, metric, threads
        self.figures = figures
        inner = self._faiss.downcast_index(index.index) if hasattr(index, "chain") else index
        self._transformed = inner is not index
        self.lists = int(getattr(inner, "nlist", 0))
        self._graph = hasattr(inner, "hnsw")
        self._kept_params: dict[tuple[int, int], Any] = {}

    @classmethod
    def open(cls, artifact: Artifact, threads: SearchThreads, check: bool) -> ApproximateIndex | None:
        """A version's index; None if it has none. Raises ArtifactError if it is damaged or of other rows, ImportError without FAISS."""
        manifest = artifact.manifest
        if manifest.index is None:
            return None
        path, module = artifact.directory / INDEX_FILE, faiss()
        expected = manifest.files[INDEX_FILE].xxh3
        if check and _xxh3(path) != expected:
            raise ArtifactError(f"{path}: its bytes are not those that were written")
        try:
            index = module.read_index(str(path))
        except RuntimeError as error:
            first = str(error).strip().splitlines()[-1]
            raise ArtifactError(
                f"{path}: FAISS {module.__version__} cannot read what FAISS {manifest.index.faiss} wrote: {first}"
            ) from None
        if (index.ntotal, index.d) != (manifest.rows, manifest.dim):
            raise ArtifactError(
                f"{path}: holds {index.ntotal:,} x {index.d}, the version {manifest.rows:,} x {manifest.dim}"
            )
        return cls(index, manifest.index, manifest.metric, threads)

    def candidates(self, queries: Vectors, n: int, params: Params) -> npt.NDArray[np.int64]:
        """Positions [Q, n], distinct in a row, the likeliest first; -1 where there are no more."""
        search_params = self._params(params.nprobe or self.figures.nprobe, params.ef_search or self.figures.ef_search)

        def search(part: Vectors) -> npt.NDArray[np.int64]:
            if not getattr(_local, "ready", False):
                self._faiss.omp_set_num_threads(1)  # of this thread
                _local.ready = True
            _, positions = self._index.search(part, n, params=search_params)
            return np.asarray(positions)

        found = self._threads.run(search, prepared(queries, self._metric))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _params(self, nprobe: int, ef_search: int) -> Any:
        if not self.lists and not self._graph:
            return None
        key = (min(nprobe or 1, self.lists), min(ef_search, MOST_BREADTH))
        kept = self._kept_params.get(key)
        if kept is None:
            kept = (
                self._faiss.SearchParametersIVF(nprobe=key[0])
                if self.lists
                else self._faiss.SearchParametersHNSW(efSearch=key[1] or 64)
            )
            if self._transformed:
                kept = self._faiss.SearchParametersPreTransform(index_params=kept)
            if len(self._kept_params) < 1000:  # callers choose them
                self._kept_params[key] = kept
        return kept


def _xxh3(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(4 << 20):
            digest.update(block)
    return digest.hexdigest()
