"""The command line: which commands there are, and how failures end.

Exit codes: 0 done; 1 refused or failed, with one sentence on standard error; 2 wrong usage; 3 the server
could not be reached; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
import typer
from typer import BadParameter

from embedserve.cli import bench, catalog, demo, health, index, plan, query, serve, steer, top
from embedserve.client import ServiceError
from embedserve.quant.errors import EmbedserveError

INTERRUPTED = 130

app = typer.Typer(
    name="embedserve", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="Serve quantised embedding tables over gRPC: Lookup by id, TopK by vector or id.",
)  # fmt: skip
UsageError: Any = BadParameter.__mro__[1]  # click's, wherever typer keeps its click
for module in (demo, catalog, index, plan, serve, health, query, steer, top, bench):
    module.register(app)


def main() -> None:
    """Runs the command and ends the process with an exit code that means something."""
    try:
        code = app(standalone_mode=False)
    except typer.Exit as ended:
        code = ended.exit_code
    except UsageError as error:
        error.show()
        code = error.exit_code
    except EmbedserveError as error:
        _fail(str(error), 1)
    except ServiceError as error:
        unreachable = error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        _fail(str(error), 3 if unreachable else 1)
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}", 1)
    except typer.Abort:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _fail("interrupted; nothing was published", INTERRUPTED)
    sys.exit(code or 0)


def _fail(message: str, code: int) -> None:
    print(f"embedserve: {message}", file=sys.stderr)
    sys.exit(code)
