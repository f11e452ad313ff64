"""Builds a version's index: tries kinds of index on sampled rows, keeps the quickest that finds what the exact search finds.

Recall is of the exact top k of the version's own rows, on queries of which one half tunes and the other half
is measured in the end. The version with an index is a new one: same rows, same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embedserve.index.approximate import ApproximateIndex, Params, Vectors, faiss, prepared
from embedserve.index.exact import Filter, Layer, exact_topk
from embedserve.index.families import Family, families
from embedserve.index.search import search_topk
from embedserve.index.threads import SearchThreads
from embedserve.quant import INDEX_FILE, Artifact, Catalog, IndexFigures, Manifest, Metric, Output
from embedserve.quant.errors import FailedPrecondition, InvalidArgument
from embedserve.quant.kernels import _native

SAMPLE_ROWS, TRAIN_ROWS, CHUNK_ROWS = 200_000, 100_000, 50_000
QUERIES, TIMED_QUERIES = 400, 64
LEAST_ROWS = 2_000  # fewer are scored in microseconds
NOISE = 0.5  # of a row's own spread, in queries made from rows

Say = Callable[[str], None]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class BuildOptions:
    """recall of the exact top k; memory: most bytes of the index, over those of the rows as FP32; spec: a FAISS factory
    string, in place of trying; queries [Q, dim] and where they are from: such as will be asked."""

    recall: float = 0.99
    k: int = 10
    memory: float = 0.125
    spec: str = ""
    queries: Vectors | None = None
    queries_from: str = "rows with noise added"


@dataclass
class Trial:
    """What a kind of index was found to do on the sample; looks: (recall, us a query) of every search of it tried."""

    family: Family
    params: Params
    recall: float
    us_a_query: float
    bytes_a_row: float
    looks: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Outcome:
    """manifest: of the new version, or None when exact search is as quick; exact_us_a_query: what it takes."""

    manifest: Manifest | None
    exact_us_a_query: float
    trials: list[Trial] = field(default_factory=list)


def build_index(
    catalog: Catalog, table: str, version: str, options: BuildOptions, say: Say, progress: Progress
) -> Outcome:
    """Writes a new, unpublished version with an index. `progress` hears of rows added, of all rows.

    Raises FailedPrecondition if no kind of index reaches the recall, saying what was reached, InvalidArgument,
    ImportError without FAISS, NotFound, ArtifactError.
    """
    artifact = catalog.open(table, version)
    metric = artifact.manifest.metric
    if artifact.manifest.rows < LEAST_ROWS and not options.spec:
        return Outcome(None, 0.0)
    queries = _queries(artifact, options)
    tuning, held_out = queries[::2], queries[1::2]
    rng = np.random.default_rng(0)
    sample = _Rows(artifact, rng)
    say(
        f"{len(queries)} queries ({options.queries_from}); kinds of index are tried on {sample.rows:,} of {artifact.manifest.rows:,} rows"
    )
    truth = _Truth(sample.layer, metric, tuning, options.k)
    kinds = (
        [_given(options.spec)]
        if options.spec
        else families(artifact.manifest.rows, artifact.manifest.dim, options.memory)
    )
    trials = [trial for kind in kinds if (trial := _try(kind, sample, metric, truth, options, say))]
    good = [trial for trial in trials if trial.recall >= options.recall]
    if not good:
        raise FailedPrecondition(_missed(trials, options, artifact.manifest))
    best = min(good, key=lambda trial: trial.us_a_query)
    if not options.spec and best.us_a_query >= truth.us_a_query:
        return Outcome(None, truth.us_a_query, trials)
    say(f"building {best.family.spec} over {artifact.manifest.rows:,} rows")
    whole = sample if sample.rows == artifact.manifest.rows else _Rows(artifact, None)
    index = _filled(best.family.spec, whole, metric, progress)
    if whole is not sample:
        truth = _Truth(whole.layer, metric, tuning, options.k)
        tuned = _tuned(_opened(index, metric), best.family, whole.layer, metric, truth, options)
        if tuned.recall < options.recall:
            raise FailedPrecondition(_missed([tuned], options, artifact.manifest))
        best = tuned
    final = _Truth(whole.layer, metric, held_out, options.k)
    recall, us = final.of(_opened(index, metric), best.params)
    figures = _figures(best, options, recall, us, final.us_a_query)
    return Outcome(_written(catalog, artifact, index, figures), final.us_a_query, trials)


class _Rows:
    """A version's rows, or a sample of them, as a layer to search and as vectors to index."""

    def __init__(self, artifact: Artifact, rng: np.random.Generator | None) -> None:
        manifest = artifact.manifest
        stored = artifact.rows
        if rng is not None and manifest.rows > SAMPLE_ROWS:
            stored = stored[np.unique(rng.integers(0, manifest.rows, SAMPLE_ROWS))]
        fmt = manifest.format
        self.rows, self._dim = len(stored), fmt.dim
        # Positions stand for keys here: a sample has its own, and only positions are compared.
        self.layer = Layer(_native.Table(stored, fmt.dim, fmt.type.native, fmt.wide), None)

    def vectors(self, positions: npt.NDArray[np.int64]) -> Vectors:
        out = np.empty((len(positions), self._dim), np.float32)
        self.layer.table.gather(positions, Output.FLOAT32, None, out)
        return out

    def chunks(self) -> Iterator[Vectors]:
        for first in range(0, self.rows, CHUNK_ROWS):
            yield self.vectors(np.arange(first, min(first + CHUNK_ROWS, self.rows)))


class _Truth:
    """The exact answer to some queries, and how long it takes."""

    def __init__(self, layer: Layer, metric: Metric, queries: Vectors, k: int) -> None:
        self._layer, self._metric, self._queries, self._k = layer, metric, queries, k
        _, scores, counts = exact_topk([layer], metric, queries, k, _no_filter(len(queries)))
        self._least = scores[np.arange(len(queries)), counts - 1]  # ties count
        self._wanted = counts
        self.us_a_query = _timed(lambda q: exact_topk([layer], metric, q, k, _no_filter(1)), queries)

    def of(self, index: ApproximateIndex, params: Params, timed: bool = True) -> tuple[float, float]:
        """Recall and microseconds a query of a search."""

        def ask(queries: Vectors) -> Any:
            return search_topk(
                [self._layer], self._metric, index, queries, self._k, _no_filter(len(queries)), params=params
            )

        (_, scores, counts), _ = ask(self._queries)
        real = np.arange(scores.shape[1])[None, :] < counts[:, None]
        hits = (real & (scores >= self._least[:, None])).sum(axis=1)
        recall = float((np.minimum(hits, self._wanted) / self._wanted).mean())
        return recall, _timed(ask, self._queries) if timed else 0.0


def _no_filter(n_queries: int) -> Filter:
    return Filter([np.empty(0, np.int64)] * n_queries)


def _timed(ask: Callable[[Vectors], Any], queries: Vectors) -> float:
    """Microseconds of one query asked by itself, the median."""
    times = []
    for query in queries[:TIMED_QUERIES]:
        begun = time.perf_counter()
        ask(query[None])
        times.append(time.perf_counter() - begun)
    return float(np.median(times)) * 1e6


def _queries(artifact: Artifact, options: BuildOptions) -> Vectors:
    dim, rng = artifact.manifest.dim, np.random.default_rng(1)
    if options.queries is not None:
        queries = np.ascontiguousarray(options.queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != dim:
            raise InvalidArgument("queries", f"of shape {queries.shape}; the table has dim {dim}")
        if not np.isfinite(queries).all():
            raise InvalidArgument("queries", f"query {int(np.argmin(np.isfinite(queries).all(axis=1)))} is not finite")
        queries = queries[rng.permutation(len(queries))[:QUERIES]]
    else:
        rows = _Rows(artifact, None)
        queries = rows.vectors(rng.integers(0, rows.rows, QUERIES))
        spread = queries.std(axis=1, keepdims=True)
        queries += (NOISE * spread * rng.standard_normal(queries.shape)).astype(np.float32)
    queries = queries[queries.any(axis=1)]
    if len(queries) < 2:
        raise InvalidArgument("queries", "fewer than two that are not zero; an index cannot be tuned by them")
    return queries


def _given(spec: str) -> Family:
    return Family(spec, 0)


def _try(kind: Family, sample: _Rows, metric: Metric, truth: _Truth, options: BuildOptions, say: Say) -> Trial | None:
    try:
        index = _filled(kind.spec, sample, metric, lambda rows: None)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        if options.spec:
            raise InvalidArgument("spec", f"{kind.spec!r}: {reason}") from None
        say(f"{kind.spec}: cannot be built here: {reason}")
        return None
    trial = _tuned(_opened(index, metric), kind, sample.layer, metric, truth, options)
    trial.bytes_a_row = len(_serialized(index)) / sample.rows
    say(
        f"{kind.spec}: recall@{options.k} {trial.recall:.4f}, {trial.us_a_query:,.0f} us a query (exact {truth.us_a_query:,.0f}), "
        f"{trial.bytes_a_row:.1f} bytes a row"
    )
    return trial


def _tuned(
    index: ApproximateIndex, kind: Family, layer: Layer, metric: Metric, truth: _Truth, options: BuildOptions
) -> Trial:
    """The quickest search of those that reach the recall; else the one that comes nearest."""
    family = Family(kind.spec, 0, kind.coarse)
    best: Trial | None = None
    nearest = Trial(family, Params(oversample=1), -1.0, 0.0, 0.0)
    done: set[int] = set()
    looks: list[tuple[float, float]] = []
    for params in family.searches():
        if params.oversample in done:
            continue  # probing further only takes longer
        recall, us = truth.of(index, params)
        looks.append((recall, us))
        trial = Trial(family, params, recall, us, 0.0, looks)
        if recall >= options.recall:
            done.add(params.oversample)
            if best is None or us < best.us_a_query:
                best = trial
        elif recall > nearest.recall:
            nearest = trial
    return best or nearest


def _filled(spec: str, rows: _Rows, metric: Metric, progress: Progress) -> Any:
    module = faiss()
    kind = module.METRIC_L2 if metric is Metric.L2 else module.METRIC_INNER_PRODUCT
    dim = rows.vectors(np.zeros(1, np.int64)).shape[1]
    index = module.index_factory(dim, spec, kind)
    if not index.is_trained:
        chosen = (
            np.random.default_rng(2).permutation(rows.rows)[:TRAIN_ROWS]
            if rows.rows > TRAIN_ROWS
            else np.arange(rows.rows)
        )
        index.train(prepared(rows.vectors(np.sort(chosen)), metric))
    done = 0
    for chunk in rows.chunks():
        index.add(prepared(chunk, metric))
        done += len(chunk)
        progress(done)
    return index


def _opened(index: Any, metric: Metric) -> ApproximateIndex:
    untuned = IndexFigures(
        spec="",
        oversample=1,
        nprobe=0,
        ef_search=0,
        recall=0,
        target=0,
        k=1,
        queries="",
        us_a_query=0,
        exact_us_a_query=0,
        faiss="",
    )
    return ApproximateIndex(index, untuned, metric, SearchThreads(1))


def _serialized(index: Any) -> npt.NDArray[np.uint8]:
    return np.asarray(faiss().serialize_index(index))


def _figures(best: Trial, options: BuildOptions, recall: float, us: float, exact_us: float) -> IndexFigures:
    return IndexFigures(
        spec=best.family.spec, oversample=best.params.oversample, nprobe=best.params.nprobe, ef_search=best.params.ef_search,
        recall=recall, target=options.recall, k=options.k, queries=options.queries_from, us_a_query=us,
        exact_us_a_query=exact_us, faiss=faiss().__version__,
    )  # fmt: skip


def _written(catalog: Catalog, artifact: Artifact, index: Any, figures: IndexFigures) -> Manifest:
    base = artifact.manifest
    with catalog.writer(base.table) as writer:
        writer.rows_of(artifact)
        writer.add_file(INDEX_FILE, _serialized(index))
        document = base.model_dump(mode="json", by_alias=True, exclude={"files", "created", "version", "index"})
        return catalog.commit(writer, base.table, {**document, "parent": base.version, "index": figures.model_dump()})


def _missed(trials: list[Trial], options: BuildOptions, manifest: Manifest) -> str:
    if not trials:
        return f"no kind of index could be built and fits into {options.memory:g} of the rows' size as FP32; allow more with --memory"
    best = max(trials, key=lambda trial: trial.recall)
    return (
        f"no index of {manifest.table} {manifest.version} reached recall {options.recall:g}@{options.k}; the best was "
        f"{best.family.spec} with {best.recall:.4f}; ask for less, or allow more than --memory {options.memory:g}; "
        "until then its TopK stays exact"
    )
