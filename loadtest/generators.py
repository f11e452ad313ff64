"""Closed-loop load on one unary method from a process of its own: h2load when it is on PATH, else grpcio.

python -m embedserve.loadtest.generators HOST:PORT METHOD REQUEST_FILE CALLERS REQUESTS     (the grpcio one)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc


def name() -> str:
    return "h2load" if shutil.which("h2load") else "grpcio client"


def rate(
    address: str, method: str, request: bytes, answer_bytes: int, callers: int, requests: int, cpus: set[int] | None
) -> float:
    """Requests a second over `requests` of them, `callers` outstanding. Raises RuntimeError if any fails or is answered short."""
    with tempfile.NamedTemporaryFile() as file:
        if name() == "h2load":
            file.write(b"\0" + len(request).to_bytes(4, "big") + request)  # gRPC's length-prefixed message
            file.flush()
            return _h2load(address, method, file.name, answer_bytes, callers, requests, cpus)
        file.write(request)
        file.flush()
        command = [
            sys.executable,
            "-m",
            "embedserve.loadtest.generators",
            address,
            method,
            file.name,
            str(callers),
            str(requests),
        ]
        return float(_run(command, cpus))


def _run(command: list[str], cpus: set[int] | None) -> str:
    pin = ["taskset", "-c", ",".join(map(str, sorted(cpus)))] if cpus else []
    done = subprocess.run([*pin, *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"load generator failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _h2load(
    address: str, method: str, file: str, answer_bytes: int, callers: int, requests: int, cpus: set[int] | None
) -> float:
    connections = min(4, callers)
    output = _run(
        ["h2load", f"--requests={requests}", f"--clients={connections}", f"--max-concurrent-streams={callers // connections}", "--threads=1",
         f"--data={file}", "--header=content-type: application/grpc", "--header=te: trailers", f"http://{address}{method}"],
        cpus,
    )  # fmt: skip
    statuses = re.search(r"requests: .*?(\d+) succeeded, (\d+) failed, (\d+) errored", output)
    rate = re.search(r"finished in .*?, ([\d.]+) req/s", output)
    if not statuses or not rate or int(statuses[2]) or int(statuses[3]) or int(statuses[1]) != requests:
        raise RuntimeError(f"h2load: {statuses[0] if statuses else output[-500:]}")
    # A gRPC error is a success to HTTP; but it carries no answer.
    data = re.search(r"\((\d+)\) data", output)
    if not data or int(data[1]) < requests * answer_bytes:
        raise RuntimeError(f"answers are short: {data[0] if data else output[-500:]}")
    return float(rate[1])


def main() -> None:
    address, method, file = sys.argv[1:4]
    callers, requests = map(int, sys.argv[4:6])
    request = Path(file).read_bytes()
    left = iter(range(requests))  # threads draw from it one at a time
    ready = threading.Barrier(callers + 1)

    def caller() -> None:
        with grpc.insecure_channel(
            address, [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        ) as channel:
            grpc.channel_ready_future(channel).result()
            call = channel.unary_unary(method)
            ready.wait()
            for _ in left:
                call(request)
            ready.wait()

    threads = [threading.Thread(target=caller, daemon=True) for _ in range(callers)]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    ready.wait()
    print(requests / (time.perf_counter() - start))


if __name__ == "__main__":
    main()
