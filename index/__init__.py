"""Nearest rows of a query: exact, or by candidates of an index."""

from embedserve.index.approximate import ApproximateIndex, Params
from embedserve.index.exact import Filter, Layer, exact_topk
from embedserve.index.search import search_topk
from embedserve.index.threads import SearchThreads

__all__ = ["ApproximateIndex", "Filter", "Layer", "Params", "SearchThreads", "exact_topk", "search_topk"]
