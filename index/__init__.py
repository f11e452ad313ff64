"""Nearest rows of a query."""

from embedserve.index.exact import Filter, exact_topk

__all__ = ["Filter", "exact_topk"]
