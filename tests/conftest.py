"""Fixtures that every test may use: catalogs made by real imports, servers in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import reference
from hypothesis import HealthCheck, settings

from embedserve.client import AdminClient, Client
from embedserve.loadtest.servers import ServerProcess
from embedserve.quant import Artifact, Catalog, ImportOptions, Metric, RowType, import_table, open_keys, open_matrix

settings.register_profile(
    "embedserve", deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck)
)
settings.load_profile("embedserve")

Publish = Callable[..., str]
ITEM_ROWS, ITEM_DIM = 1000, 24


def publish_table(root: Path, table: str, values: np.ndarray, keys: np.ndarray | None = None, **options: object) -> str:
    """Imports and publishes a matrix; returns the version."""
    root.mkdir(parents=True, exist_ok=True)
    source = root.parent / f"{table}-source.npz"
    np.savez(source, values=values, **({} if keys is None else {"keys": keys}))
    key_array = None if keys is None else open_keys(f"{source}:keys", len(values))
    catalog = Catalog(root)
    manifest = import_table(catalog, table, open_matrix(f"{source}:values"), ImportOptions(**options), key_array)
    return catalog.publish(table, manifest.version)


def rows_of(root: Path, table: str, version: str = "") -> tuple[np.ndarray, Artifact]:
    """A version's decoded rows, by the oracle, and the version."""
    artifact = Catalog(root).open(table, version)
    manifest = artifact.manifest
    return reference.decode(artifact.rows, manifest.row_type.native, manifest.wide, manifest.dim), artifact


@contextmanager
def serving(
    root: Path | None, *flags: str, log: Path | None = None
) -> Iterator[tuple[ServerProcess, Client, AdminClient]]:
    """A server of its own, and both its clients."""
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(root, *flags, log=log))
        client = stack.enter_context(Client(server.address))
        admin = stack.enter_context(AdminClient(server.admin_address))
        yield server, client, admin


def eventually(check: Callable[[], object], timeout_s: float = 15) -> None:
    """Waits until `check` gives something true; an assertion that fails in it is tried again too."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            if check():
                return
            failure = None
        except AssertionError as error:
            failure = error
        if time.monotonic() > end:
            raise failure or AssertionError(f"not within {timeout_s} s")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def item_values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ITEM_ROWS, ITEM_DIM)).astype(np.float32)


@pytest.fixture(scope="session")
def user_keys() -> np.ndarray:
    """Distinct, unsorted, some negative, some near int64's ends."""
    keys = np.random.default_rng(1).choice(np.arange(-500, 5000), 300, replace=False).astype(np.int64)
    keys[:2] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    return keys


@pytest.fixture(scope="session")
def catalog_root(tmp_path_factory: pytest.TempPathFactory, item_values: np.ndarray, user_keys: np.ndarray) -> Path:
    """items: dense keys, INT8. users: own keys, FP32. big: FP32 with a value past FLOAT16. items has two versions."""
    root = tmp_path_factory.mktemp("catalog") / "root"
    publish_table(root, "items", item_values + 1)
    publish_table(root, "items", item_values)
    users = np.random.default_rng(2).standard_normal((len(user_keys), ITEM_DIM)).astype(np.float32)
    publish_table(root, "users", users, user_keys, row_type=RowType.FP32)
    publish_table(root, "big", np.array([[1e6, 1], [2, 3]], np.float32), row_type=RowType.FP32, metric=Metric.L2)
    return root


@pytest.fixture(scope="session")
def server(catalog_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with ServerProcess(catalog_root, "--max-k", "500", "--max-ids", "20000", log=log) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as opened:
        yield opened
