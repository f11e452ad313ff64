"""The health command: what a container's health check runs."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from embedserve.cli.output import console
from embedserve.cli.query import RootCertificates, Server

TIMEOUT_S = 2.0


def register(app: typer.Typer) -> None:
    app.command()(health)


def health(
    server: Server,
    table: Annotated[str, typer.Option(help="A table, or TABLE:current; the whole server if not given.")] = "",
    tls_ca: RootCertificates = None,
) -> None:
    """Ask the standard health service. Exit code 0: serving; 1: not; 3: no answer.

    Example: `embedserve health 127.0.0.1:50051 --table items`
    """
    if tls_ca:
        channel = grpc.secure_channel(server, grpc.ssl_channel_credentials(tls_ca.read_bytes()))
    else:
        channel = grpc.insecure_channel(server)
    with channel:
        try:
            request = health_pb2.HealthCheckRequest(service=table)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                console.print(f"{table}: not a table of this server")
                raise typer.Exit(1) from None
            console.print(f"{server}: {error.code().name}: {error.details()}")
            raise typer.Exit(3) from None
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    console.print(name)
    if status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)
