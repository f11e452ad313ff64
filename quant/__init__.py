"""Rows, artifacts and the catalog: everything between a matrix in a file and bytes that can be served."""

from embedserve.quant.artifact import Artifact, Manifest, Quality
from embedserve.quant.catalog import Catalog, check_table_name
from embedserve.quant.importer import ImportOptions, import_table
from embedserve.quant.rows import Calibration, Metric, Output, RowFormat, RowType, Scheme
from embedserve.quant.sources import StoredArray, open_keys, open_matrix

__all__ = [
    "Artifact",
    "Calibration",
    "Catalog",
    "ImportOptions",
    "Manifest",
    "Metric",
    "Output",
    "Quality",
    "RowFormat",
    "RowType",
    "Scheme",
    "StoredArray",
    "check_table_name",
    "import_table",
    "open_keys",
    "open_matrix",
]
