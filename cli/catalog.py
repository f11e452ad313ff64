"""Commands on a catalog's files: import, publish, delta, fold, tables, describe, verify."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from embedserve.cli.output import Json, console, print_json, print_table, progress_bar
from embedserve.quant import (
    Calibration,
    Catalog,
    ImportOptions,
    Manifest,
    Metric,
    RedisCatalog,
    RedisConnection,
    RowType,
    Scheme,
    fold_upserts,
    import_table,
    make_delta,
    open_keys,
    open_matrix,
)
from embedserve.quant.errors import NotFound
from embedserve.quant.redis_catalog import PREFIX

PUBLISH_TIMEOUT_S = 30.0  # a batch of pages at once, and nobody's request waits

Root = Annotated[Path, typer.Option("--root", help="Catalog directory.", envvar="EMBEDSERVE_ROOT")]
TableName = Annotated[str, typer.Option("--table", help="Name of the table.")]


class Bits(str, Enum):
    EIGHT, FOUR, SIXTEEN, THIRTY_TWO = "8", "4", "16", "32"


class NonFinite(str, Enum):
    REFUSE, ZERO = "refuse", "zero"


def register(app: typer.Typer) -> None:
    app.command("import")(import_)
    app.command()(publish)
    app.command()(delta)
    app.command()(fold)
    app.command()(tables)
    app.command()(describe)
    app.command()(verify)


def import_(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="PATH or PATH:ARRAY of a .npy, .npz or .safetensors file.")
    ],
    root: Root,
    table: TableName,
    keys: Annotated[
        str | None, typer.Option(help="PATH or PATH:ARRAY of int64 keys, one a row; none: keys are 0..N-1.")
    ] = None,
    bits: Annotated[Bits, typer.Option(help="8 or 4: quantised codes; 16 or 32: floats.")] = Bits.EIGHT,
    scheme: Annotated[Scheme, typer.Option(help="symmetric keeps 0 exact.")] = Scheme.ASYMMETRIC,
    calibration: Annotated[Calibration, typer.Option(help="mse suits 4 bits; slower.")] = Calibration.MINMAX,
    metric: Annotated[Metric, typer.Option(help="What TopK scores by.")] = Metric.IP,
    nonfinite: Annotated[NonFinite, typer.Option(help="What to do with NaN and infinity.")] = NonFinite.REFUSE,
    publish: Annotated[bool, typer.Option("--publish", help="Make the new version current.")] = False,
    json: Json = False,
) -> None:
    """Quantise a matrix into a new version of a table.

    Example: `embedserve import items.npy --keys ids.npy --root catalog --table items --metric cosine --publish`
    """
    catalog = Catalog(root)
    matrix = open_matrix(source)
    key_array = open_keys(keys, matrix.shape[0]) if keys else None
    options = ImportOptions(
        RowType.of_bits(int(bits.value)),
        scheme,
        calibration,
        metric,
        "zero" if nonfinite is NonFinite.ZERO else "refuse",
    )
    started = time.monotonic()
    with progress_bar(f"import {table}", matrix.shape[0]) as progress:
        manifest = import_table(catalog, table, matrix, options, key_array, progress)
    elapsed_s = time.monotonic() - started
    if publish:
        catalog.publish(table, manifest.version)
    if json:
        print_json({**manifest.model_dump(mode="json", by_alias=True), "published": publish})
        return
    quality = manifest.quality
    stride = manifest.format.stride
    console.print(
        f"{table} {manifest.version}: {manifest.rows:,} rows x {manifest.dim} as {manifest.row_type.value}"
        f"{' (wide: FP32 scale and bias, a row did not fit FP16 ones)' if manifest.wide else ''}, {stride} bytes a row "
        f"({stride / (4 * manifest.dim):.0%} of FP32), {matrix.nbytes / 1e9 / max(elapsed_s, 1e-9):.2f} GB/s"
    )
    recall = f", recall@10 {quality.recall_at_10:.4f}" if quality.recall_at_10 is not None else ""
    console.print(f"cosine {quality.mean_cosine:.6f}, max error {quality.max_error:.3g}{recall}")
    if quality.nonfinite_zeroed:
        console.print(f"stored 0 for {quality.nonfinite_zeroed:,} values that were NaN or infinite")
    console.print("published" if publish else f"not published; next: embedserve publish --root {root} --table {table}")


def publish(
    root: Root,
    table: TableName,
    version: Annotated[str, typer.Option(help="Which one; the newest if not given.")] = "",
    delta: Annotated[Path | None, typer.Option(metavar="DIR", help="Take this delta into the catalog first.")] = None,
    to: Annotated[str, typer.Option(metavar="URL", help="Load it into this Redis, and make it current there.")] = "",
    prefix: Annotated[str, typer.Option(help="What all keys in Redis begin with.")] = PREFIX,
    expire: Annotated[bool, typer.Option("--expire", help="Then remove from Redis all but the newest --keep.")] = False,
    keep: Annotated[int, typer.Option(min=1, help="Versions that --expire leaves.")] = 2,
) -> None:
    """Make a version current, after checking every byte of it. An older one takes every server back to it.

    --to redis://HOST:PORT/DB does so in Redis instead, for servers without a catalog of their own. A load that was interrupted goes
    on where it was; until it is whole, the version before it is served.

    Example: `embedserve publish --root catalog --table items --to redis://127.0.0.1:6379 --expire`
    """
    catalog = Catalog(root)
    if delta and version:
        raise typer.BadParameter("give either --version or --delta, which has a version of its own")
    if delta:
        version = catalog.install_delta(table, delta)
    if to:
        _publish_to_redis(
            catalog, table, version, RedisCatalog(RedisConnection(to, PUBLISH_TIMEOUT_S), prefix), keep if expire else 0
        )
        return
    console.print(f"{table}: current is {catalog.publish(table, version)}")


def _publish_to_redis(catalog: Catalog, table: str, version: str, redis: RedisCatalog, keep: int) -> None:
    newest = catalog.versions(table)[-1:] or [""]
    artifact = catalog.open(table, version or catalog.current(table) or newest[0], verify=True)
    with progress_bar(f"publish {table}", artifact.manifest.rows) as progress:
        redis.publish(artifact, progress)
    console.print(f"{table}: current in Redis is {artifact.manifest.version}")
    for gone in redis.expire(table, keep) if keep else ():
        console.print(f"{table}: removed {gone} from Redis")


def delta(
    old: Annotated[str, typer.Argument(metavar="OLD", help="The version that those who take it have.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The version that they will have.")],
    root: Root,
    table: TableName,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist.")],
    json: Json = False,
) -> None:
    """Write what changed from one version to another, small enough to send to other machines every hour.

    There: `embedserve publish --root catalog --table items --delta DIR`.

    Example: `embedserve delta 20261201T060000Z 20261201T070000Z --root catalog --table items --out items-delta`
    """
    catalog = Catalog(root)
    old_version, new_version = catalog.open(table, old), catalog.open(table, new)
    with progress_bar(f"delta {table}", new_version.manifest.rows) as progress:
        made = make_delta(old_version, new_version, out, progress)
    if json:
        print_json(made.model_dump(mode="json", by_alias=True))
        return
    share = made.file.bytes / new_version.manifest.total_bytes
    console.print(
        f"{out}: {made.changed:,} rows changed, {made.appeared:,} appeared, {made.vanished:,} vanished; "
        f"{made.file.bytes:,} bytes, {share:.1%} of the version"
    )


def fold(
    root: Root,
    table: TableName,
    publish: Annotated[bool, typer.Option("--publish", help="Make the new version current.")] = False,
) -> None:
    """Make a new version of the current one with all upserts in place.

    Example: `embedserve fold --root catalog --table items --publish`
    """
    catalog = Catalog(root)
    with progress_bar(f"fold {table}", catalog.open(table).manifest.rows) as progress:
        manifest = fold_upserts(catalog, table, progress)
    if publish:
        catalog.publish(table, manifest.version)
    console.print(
        f"{table} {manifest.version}: {manifest.rows:,} rows, upserts in place"
        + ("; published" if publish else f"; next: embedserve publish --root {root} --table {table}")
    )


def tables(root: Root, json: Json = False) -> None:
    """List a catalog's tables and versions.

    Example: `embedserve tables --root catalog`
    """
    catalog = Catalog(root)
    listing = [
        {"table": name, "current": catalog.current(name), "versions": catalog.versions(name)}
        for name in catalog.tables()
    ]
    if json:
        print_json(listing)
    elif not listing:
        console.print(
            f"no tables in {root}; make one with: embedserve import FILE --root {root} --table NAME --publish"
        )
    else:
        rows = [(t["table"], t["current"] or "not published", ", ".join(t["versions"] or [])) for t in listing]
        print_table(str(root), ("table", "current", "versions"), rows)


def describe(
    root: Root,
    table: TableName,
    version: Annotated[str, typer.Option(help="Which one; the current if not given.")] = "",
    json: Json = False,
) -> None:
    """Show what a version holds and how good it is.

    Example: `embedserve describe --root catalog --table items`
    """
    manifest: Manifest = Catalog(root).open(table, version).manifest
    document = manifest.model_dump(mode="json", by_alias=True)
    if json:
        print_json(document)
        return
    flat = {**{k: v for k, v in document.items() if not isinstance(v, dict)}, **document["quality"]}
    flat["bytes a row"] = manifest.format.stride
    flat["bytes"] = f"{manifest.total_bytes:,}"
    print_table(f"{table} {manifest.version}", ("", "value"), [(k, v) for k, v in flat.items() if v is not None])


def verify(
    root: Root,
    table: Annotated[str | None, typer.Option("--table", help="Only this table.")] = None,
    version: Annotated[str, typer.Option(help="Only this version.")] = "",
) -> None:
    """Check every byte of every version against its manifest's sha256.

    Example: `embedserve verify --root catalog`
    """
    catalog = Catalog(root)
    names = [table] if table else catalog.tables()
    if not names:
        raise NotFound(f"no tables in {root}")
    for name in names:
        versions = [version] if version else catalog.versions(name)
        for each in versions or [""]:
            catalog.open(name, each, verify=True)
            console.print(f"{name} {each}: ok")
