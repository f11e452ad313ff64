"""Nearest rows of a query."""

from embedserve.index.exact import Filter, Layer, exact_topk

__all__ = ["Filter", "Layer", "exact_topk"]
