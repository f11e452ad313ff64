"""The serve command: one flag for each field of ServerConfig."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from embedserve.server import ServerConfig, load_config
from embedserve.server import serve as run_server

CONFIG_HELP = "TOML file of the same names as these flags, with _ for -."


def register(app: typer.Typer) -> None:
    app.command("serve")(_with_config_flags(serve))


def serve(config: Path | None = None, **flags: Any) -> None:
    """Serve a catalog's published tables until SIGTERM; prints one line 'listening …' when ready.

    Every flag can also be an environment variable, EMBEDSERVE_NAME, or a line of --config; flags win over
    the environment, and that over the file.

    Example: `embedserve serve --root catalog --port 50051`
    """
    run_server(load_config(config, flags), ready=lambda line: print(line, flush=True))


def _with_config_flags(command: Any) -> Any:
    """Gives a command the fields of ServerConfig as options, so that they are written down once."""
    option = Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)]
    annotations: dict[str, Any] = {"config": option}
    for name, field in ServerConfig.model_fields.items():
        if get_origin(field.annotation) is dict:
            continue  # a table of the file; as a variable, JSON
        default = "" if field.is_required() or field.default in (None, ()) else f" [default: {field.default}]"
        annotations[name] = Annotated[_flag_type(field.annotation), typer.Option(help=f"{field.description}{default}")]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = annotations
    return command


def _flag_type(annotation: Any) -> Any:
    """A field's type as a flag: optional, so that an absent flag is told from a given one."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        annotation = str
    if get_origin(annotation) is tuple:
        annotation = list[str]
    return annotation | None
