"""Closed-loop load on one unary method from a process of its own: h2load when it is on PATH, else grpcio.

python -m embedserve.loadtest.generators HOST:PORT METHOD REQUEST_FILE CALLERS SECONDS     (the grpcio one)
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
    address: str, method: str, request: bytes, answer_bytes: int, callers: int, seconds: int, cpus: set[int] | None
) -> float:
    """Requests a second with `callers` always outstanding. Raises RuntimeError if any fails or is answered short."""
    with tempfile.NamedTemporaryFile() as file:
        if name() == "h2load":
            file.write(b"\0" + len(request).to_bytes(4, "big") + request)  # gRPC's length-prefixed message
            file.flush()
            return _h2load(address, method, file.name, answer_bytes, callers, seconds, cpus)
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
            str(seconds),
        ]
        return float(_run(command, cpus))


def _run(command: list[str], cpus: set[int] | None) -> str:
    pin = ["taskset", "-c", ",".join(map(str, sorted(cpus)))] if cpus else []
    done = subprocess.run([*pin, *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"load generator failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _h2load(
    address: str, method: str, file: str, answer_bytes: int, callers: int, seconds: int, cpus: set[int] | None
) -> float:
    connections = min(4, callers)
    output = _run(
        ["h2load", f"--duration={seconds}", f"--clients={connections}", f"--max-concurrent-streams={callers // connections}", "--threads=1",
         f"--data={file}", "--header=content-type: application/grpc", "--header=te: trailers", f"http://{address}{method}"],
        cpus,
    )  # fmt: skip
    statuses = re.search(r"requests: .*?(\d+) succeeded, (\d+) failed, (\d+) errored", output)
    if not statuses or int(statuses[2]) or int(statuses[3]) or not int(statuses[1]):
        raise RuntimeError(f"h2load: {statuses[0] if statuses else output[-500:]}")
    # A gRPC error is a success to HTTP; but it carries no answer.
    data = re.search(r"\((\d+)\) data", output)
    if not data or int(data[1]) < int(statuses[1]) * answer_bytes:
        raise RuntimeError(f"answers are short: {data[0] if data else output[-500:]}")
    return int(statuses[1]) / seconds


def main() -> None:
    address, method, file, callers, seconds = (
        sys.argv[1],
        sys.argv[2],
        sys.argv[3],
        int(sys.argv[4]),
        float(sys.argv[5]),
    )
    request = Path(file).read_bytes()
    counts = [0] * callers
    end = time.perf_counter() + seconds

    def caller(number: int) -> None:
        with grpc.insecure_channel(
            address, [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        ) as channel:
            call = channel.unary_unary(method)
            while time.perf_counter() < end:
                call(request)
                counts[number] += 1

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(counts) / seconds)


if __name__ == "__main__":
    main()
