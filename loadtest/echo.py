"""A bare grpcio server that answers every unary call with the same bytes: what the front end costs by itself.

python -m embedserve.loadtest.echo BYTES THREADS
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc


class _Echo(grpc.GenericRpcHandler):
    def __init__(self, answer: bytes) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(lambda request, context: answer)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self._handler


def main() -> None:
    answer_bytes, threads = int(sys.argv[1]), int(sys.argv[2])
    server = grpc.server(ThreadPoolExecutor(threads), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_Echo(b"e" * answer_bytes),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"listening 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
