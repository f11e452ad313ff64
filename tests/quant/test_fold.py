"""Upserts folded into versions: by themselves, and by imports."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from conftest import publish_table, rows_of

from embedserve.quant import Catalog, Place, RowType, Upserts, encode_upserts, fold_upserts
from embedserve.quant.errors import ArtifactError, FailedPrecondition, InvalidArgument

DIM = 5


def upsert(root, keys, value, table="t"):
    rows = np.repeat(np.float32(value) + np.arange(len(keys), dtype=np.float32)[:, None], DIM, 1)
    Catalog(root).upsert_log(table).append([Upserts(np.array(keys, np.int64), rows)], Place())


def table_rows(root, version=""):
    values, artifact = rows_of(root, "t", version)
    keys = np.arange(len(values)) if artifact.keys is None else artifact.keys
    return dict(zip(keys.tolist(), values[:, 0].tolist(), strict=True)), artifact


@pytest.mark.parametrize("row_type", [RowType.FP32, RowType.INT8])
def test_folding_replaces_and_appends_and_leaves_every_other_byte(tmp_path, row_type):
    root, keys = tmp_path / "root", np.array([7, -3, 9, 100])
    values = np.random.default_rng(0).standard_normal((4, DIM)).astype(np.float32)
    old = publish_table(root, "t", values, keys, row_type=row_type)
    upsert(root, [9, 55, -3], 2.0)
    upsert(root, [55], 8.0)
    folded = fold_upserts(Catalog(root), "t")
    assert Catalog(root).current("t") == old and folded.parent == old and folded.upserts.through == 1
    rows, artifact = table_rows(root, folded.version)
    before = Catalog(root).open("t", old)
    assert rows[9] == 2 and rows[-3] == 4 and rows[55] == 8 and list(rows) == [7, -3, 9, 100, 55]
    assert np.array_equal(artifact.rows[[0, 3]], before.rows[[0, 3]])
    decoded = ref.decode(artifact.rows, row_type.native, artifact.manifest.wide, DIM)
    np.testing.assert_allclose(artifact.default_row, decoded.mean(0), rtol=1e-5)
    assert artifact.manifest.quality.max_abs == max(before.manifest.quality.max_abs, 8)
    found = np.empty(5, np.int64)
    artifact.native_table().find(np.array([55, 9, -3, 8, 7]), found)
    assert found.tolist() == [4, 2, 1, -1, 0]
    Catalog(root).publish("t")
    with pytest.raises(FailedPrecondition, match="no upserts over its current version"):
        fold_upserts(Catalog(root), "t")


def test_dense_tables_fold_in_place(tmp_path):
    root = tmp_path / "root"
    publish_table(root, "t", np.zeros((6, DIM), np.float32) + 1)
    upsert(root, [4, 0], 3.0)
    Catalog(root).publish("t", fold_upserts(Catalog(root), "t").version)
    assert table_rows(root)[0] == {0: 4, 1: 1, 2: 1, 3: 1, 4: 3, 5: 1}


def test_an_import_keeps_upserts_of_keys_that_its_source_lacks(tmp_path):
    """The source has the last word on the keys it holds; upserts made after it lie over it again."""
    root, keys = tmp_path / "root", np.array([1, 2, 3])
    publish_table(root, "t", np.ones((3, DIM), np.float32), keys)
    upsert(root, [2, 77], 5.0)
    new = publish_table(root, "t", np.full((3, DIM), 9, np.float32), keys)
    rows, artifact = table_rows(root, new)
    assert rows == {1: 9, 2: 9, 3: 9, 77: 6}
    upsert(root, [2], 4.0)
    log = Catalog(root).upsert_log("t")
    read = log.read(log.begin(artifact.manifest.upserts))
    assert [batch.keys.tolist() for batch in read.batches] == [[2]]


def test_publishing_forgets_upserts_that_both_versions_hold(tmp_path):
    root = tmp_path / "root"
    publish_table(root, "t", np.ones((3, DIM), np.float32))
    log = Catalog(root).upsert_log("t")
    for value in (2, 3, 4):
        upsert(root, [1], value)
        Catalog(root).publish("t", fold_upserts(Catalog(root), "t").version)
        assert table_rows(root)[0][1] == value
    assert log.segments() == [3, 4]  # the last but one is not in the version before


def test_a_damaged_log_is_not_folded(tmp_path):
    root = tmp_path / "root"
    publish_table(root, "t", np.ones((3, DIM), np.float32))
    upsert(root, [1], 2.0)
    upsert(root, [2], 2.0)
    (segment,) = Catalog(root).upsert_log("t").directory.glob("*.log")
    data = bytearray(segment.read_bytes())
    data[60] ^= 1
    segment.write_bytes(data)
    with pytest.raises(ArtifactError, match="damaged at byte"):
        fold_upserts(Catalog(root), "t")


@pytest.mark.parametrize("value,words", [
    (np.nan, "column 2: nan must be finite"), (np.inf, "column 2: inf must be finite"), (1e8, "range does not fit"),
])  # fmt: skip
def test_rows_that_cannot_be_stored_are_named(tmp_path, value, words):
    publish_table(tmp_path / "root", "t", np.arange(15, dtype=np.float32).reshape(3, DIM))
    rows = np.zeros((2, DIM), np.float32)
    rows[1, 2:] = value, 3, 5
    with pytest.raises(InvalidArgument, match=f"values: key 8.*{words}"):
        encode_upserts(Catalog(tmp_path / "root").open("t").manifest, Upserts(np.array([7, 8]), rows))
