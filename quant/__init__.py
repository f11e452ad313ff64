"""Rows, artifacts and the catalog: everything between a matrix in a file and bytes that can be served."""

from embedserve.quant.artifact import INDEX_FILE, Artifact, IndexFigures, Manifest, Quality
from embedserve.quant.catalog import Catalog, check_table_name
from embedserve.quant.delta import changed_fraction, make_delta
from embedserve.quant.fold import EncodedUpserts, UnstorableRow, encode_upserts, fold_upserts
from embedserve.quant.importer import ImportOptions, import_table
from embedserve.quant.redis_catalog import RedisCatalog, RedisVersion
from embedserve.quant.redis_connection import RedisConnection
from embedserve.quant.rows import Calibration, Metric, Output, RowFormat, RowType, Scheme
from embedserve.quant.sources import StoredArray, key_chunks, open_keys, open_matrix, to_float32
from embedserve.quant.upsert_log import Place, UpsertLog, Upserts, latest

__all__ = [
    "INDEX_FILE",
    "Artifact",
    "Calibration",
    "Catalog",
    "EncodedUpserts",
    "ImportOptions",
    "IndexFigures",
    "Manifest",
    "Metric",
    "Output",
    "Place",
    "Quality",
    "RedisCatalog",
    "RedisConnection",
    "RedisVersion",
    "RowFormat",
    "RowType",
    "Scheme",
    "StoredArray",
    "UnstorableRow",
    "UpsertLog",
    "Upserts",
    "changed_fraction",
    "check_table_name",
    "encode_upserts",
    "fold_upserts",
    "import_table",
    "key_chunks",
    "latest",
    "make_delta",
    "open_keys",
    "open_matrix",
    "to_float32",
]
