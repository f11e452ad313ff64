"""What a version must show before it is served: quality by its manifest, and answers by a health query."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embedserve.index import Filter, Params, exact_topk
from embedserve.quant import Artifact, Manifest, Output, RedisVersion, changed_fraction
from embedserve.quant.errors import FailedPrecondition
from embedserve.server.config import ServerConfig
from embedserve.server.versions import ServedVersion

ASKED_ROWS = 64


def check_figures(new: Manifest, served: Manifest, config: ServerConfig) -> None:
    """Raises FailedPrecondition with the figure that misses its limit."""
    quality = new.quality
    if config.min_recall is not None and (quality.recall_at_10 is None or quality.recall_at_10 < config.min_recall):
        recall = "unknown" if quality.recall_at_10 is None else f"{quality.recall_at_10:.4f}"
        raise _refused(new, f"recall@10 is {recall}, and min_recall {config.min_recall:g}")
    if config.min_cosine is not None and quality.mean_cosine < config.min_cosine:
        raise _refused(
            new, f"mean cosine to its source is {quality.mean_cosine:.6f}, and min_cosine {config.min_cosine:g}"
        )
    loss = 1 - new.rows / served.rows
    if loss > config.max_row_loss:
        raise _refused(
            new,
            f"{new.rows:,} rows are {loss:.1%} fewer than the {served.rows:,} of {served.version}, and max_row_loss {config.max_row_loss:g}",
        )


def check_changes(new: Artifact | RedisVersion, served: Artifact | RedisVersion, config: ServerConfig) -> None:
    """Raises FailedPrecondition when more rows changed than may. Reads both versions if there is such a limit."""
    if config.max_changed_fraction is None:
        return
    if not isinstance(new, Artifact) or not isinstance(served, Artifact):
        raise _refused(new.manifest, "max_changed_fraction compares rows on this machine, and these are in Redis")
    changed = changed_fraction(served, new)
    if changed > config.max_changed_fraction:
        raise _refused(
            new.manifest,
            f"{changed:.1%} of its rows differ from {served.manifest.version}'s, and max_changed_fraction {config.max_changed_fraction:g}",
        )


def ask(version: ServedVersion) -> None:
    """The health query: rows spread over the version are found by key, decoded and ranked. Raises FailedPrecondition."""
    keys = version.artifact.sample_keys(ASKED_ROWS)
    rows = np.empty((len(keys), version.dim), np.float32)
    if missing := version.gather(keys, Output.FLOAT32, rows):
        key = keys[np.frombuffer(missing, "<u4")[0]]
        raise _refused(version.manifest, f"health query: key {key} is one of its own, and has no row")
    if not np.isfinite(rows).all():
        key = keys[int(np.argmin(np.isfinite(rows).all(axis=1)))]
        raise _refused(version.manifest, f"health query: the row of key {key} is not finite")
    if version.searchable:
        _search(version, keys, rows)


def _search(version: ServedVersion, keys: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> None:
    own = version.layers[0]
    positions = np.empty(len(keys), np.int64)
    own.table.find(keys, positions)
    at = positions if own.keys is None else own.keys[positions]
    if (positions < 0).any() or not np.array_equal(at, keys):
        wrong = int(np.argmin((at == keys) & (positions >= 0)))
        raise _refused(version.manifest, f"health query: key {keys[wrong]} is found at row {positions[wrong]}")
    filter = Filter([np.empty(0, np.int64)], np.sort(positions))
    _, scores, counts = exact_topk(version.layers[:1], version.manifest.metric, rows[:1], 1, filter)
    expected = int(len(positions) > len(np.intersect1d(positions, own.dropped)))
    if version.index is not None:
        candidates = version.index.candidates(rows[:1], len(rows), Params())
        if candidates.max() < 0 or candidates.max() >= version.manifest.rows:
            raise _refused(version.manifest, "health query: its index finds no rows of its own")
    if counts[0] != expected or not np.isfinite(scores[0, : counts[0]]).all():
        raise _refused(version.manifest, "health query: a TopK over its own rows found none")


def _refused(new: Manifest, reason: str) -> FailedPrecondition:
    return FailedPrecondition(f"{new.table} {new.version} is refused: {reason}")
