"""What a server costs, measured with the least client: its floor.

``python benchmarks/s3mem/rawclient.py URL --access KEY --secret SECRET --pid PID``
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

if __name__ == "__main__":  # run as a file: the package is found from the root, not from in here
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.s3mem.rawcalls import Client, Connection, Endpoint, Signer

MiB: Final = 1 << 20
GiB: Final = 1 << 30
_HEADING: Final = (
    "| verb | threads | MiB/s | requests/s | p50 ms | p99 ms | server s/GiB | client s/GiB |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Many requests of one kind.

    Args:
        verb: ``PUT``, ``GET``, ``RANGE``, ``HEAD`` or ``LIST``.
        bucket: the bucket they go to, which is there.
        count: how many.
        nbytes: the size of an object; RANGE reads its second quarter.
        threads: by how many threads, a connection each.
        ahead: make and sign all requests before the clock starts.
        prefix: what the keys start with.
    """

    verb: str
    bucket: str
    count: int
    nbytes: int
    threads: int
    ahead: bool = False
    prefix: str = "o/"

    def head(self, signer: Signer, index: int) -> bytes:
        """Return the head of one of the requests."""
        path = f"/{self.bucket}/{self.prefix}{index:07d}"
        if self.verb == "LIST":
            query = f"list-type=2&max-keys=1000&prefix={quote(self.prefix, safe='')}"
            return signer.head("GET", f"/{self.bucket}", query=query)
        if self.verb == "RANGE":
            quarter = self.nbytes // 4
            extent = {"range": f"bytes={quarter}-{2 * quarter - 1}"}
            return signer.head("GET", path, headers=extent)
        return signer.head(self.verb, path, length=self.nbytes if self.verb == "PUT" else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a load took."""

    seconds: float
    requests_s: float
    mib_s: float
    user_s: float
    system_s: float
    server_s: float
    nbytes: int
    p50_ms: float
    p99_ms: float

    @property
    def client_s_gib(self) -> float:
        """CPU seconds of this process per GiB of bodies."""
        return (self.user_s + self.system_s) / (self.nbytes / GiB)

    @property
    def server_s_gib(self) -> float:
        """CPU seconds of the server per GiB of bodies."""
        return self.server_s / (self.nbytes / GiB)


def measure(
    endpoint: Endpoint, load: Load, *, body: bytes = b"", server_pid: int | None = None
) -> Measurement:
    """Run a load and return what it took; *body* is what PUT sends.

    Raises:
        RuntimeError: a request was refused.
    """
    if load.verb == "PUT" and len(body) != load.nbytes:
        raise ValueError("the body has not the load's size")
    signer = Signer(endpoint)
    make: Callable[[int], bytes] = lambda index: load.head(signer, index)  # noqa: E731
    if load.ahead:
        make = [make(index) for index in range(load.count)].__getitem__
    server_before, before = _server_cpu_s(server_pid), resource.getrusage(resource.RUSAGE_SELF)
    seconds, times, nbytes = _run(endpoint, load, make, body)
    after = resource.getrusage(resource.RUSAGE_SELF)
    ordered = sorted(times)
    return Measurement(
        seconds=seconds, requests_s=load.count / seconds, mib_s=nbytes / MiB / seconds,
        user_s=after.ru_utime - before.ru_utime, system_s=after.ru_stime - before.ru_stime,
        server_s=_server_cpu_s(server_pid) - server_before, nbytes=nbytes,
        p50_ms=1e3 * statistics.median(ordered), p99_ms=1e3 * ordered[len(ordered) * 99 // 100],
    )  # fmt: skip


def _run(
    endpoint: Endpoint, load: Load, make: Callable[[int], bytes], body: bytes
) -> tuple[float, list[float], int]:
    """Return the seconds a load took, each request's, and the bytes of all bodies."""
    numbers = itertools.count()
    times: list[float] = []
    sizes: list[int] = []
    refusals: list[str] = []
    connections = [Connection(endpoint) for _ in range(load.threads)]

    def work(connection: Connection) -> None:
        out = memoryview(bytearray(max(load.nbytes, MiB)))
        sent = body if load.verb == "PUT" else None
        has_body = load.verb != "HEAD"
        while (index := next(numbers)) < load.count and not refusals:
            started = time.perf_counter()
            connection.send(make(index), sent)
            status, _, nbytes = connection.receive_into(out, has_body=has_body)
            times.append(time.perf_counter() - started)
            sizes.append(len(sent) if sent else nbytes)
            if status >= 300:
                refusals.append(f"{status}: {bytes(out[:300])!r}")

    threads = [threading.Thread(target=work, args=(each,)) for each in connections]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    if refusals or len(times) < load.count:
        raise RuntimeError(refusals[0] if refusals else "a connection failed")
    return seconds, times, sum(sizes)


def _server_cpu_s(pid: int | None) -> float:
    if pid is None:
        return 0.0
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a server with one verb after the other; one line each."""
    options = _parser().parse_args(arguments)
    endpoint = Endpoint.of(options.url, options.access, options.secret)
    client = Client(endpoint)
    client.call("PUT", f"/{options.bucket}", body=b"")
    client.close()
    body = os.urandom(options.bytes)
    if not options.json:
        print(_HEADING)
    for threads, verb in itertools.product(options.threads.split(","), options.verbs.split(",")):
        load = Load(
            verb=verb, bucket=options.bucket, count=options.count, nbytes=options.bytes,
            threads=int(threads), ahead=options.sign == "ahead",
        )  # fmt: skip
        found = measure(endpoint, load, body=body if verb == "PUT" else b"", server_pid=options.pid)
        row = {"verb": verb, "threads": load.threads, **asdict(found)}
        print(json.dumps(row) if options.json else _row(load, found), flush=True)
    return 0


def _row(load: Load, found: Measurement) -> str:
    per_gib = f"{found.server_s_gib:.2f} | {found.client_s_gib:.2f}" if found.nbytes else "- | -"
    return (
        f"| {load.verb} | {load.threads} | {found.mib_s:.0f} | {found.requests_s:.0f} "
        f"| {found.p50_ms:.2f} | {found.p99_ms:.2f} | {per_gib} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure an S3 server with the least client.")
    parser.add_argument("url")
    parser.add_argument("--access", required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--bucket", default="rawclient", help="made where it is not there")
    parser.add_argument("--verbs", default="PUT,GET")
    parser.add_argument("--threads", default="1,8,32")
    parser.add_argument("--count", type=int, default=2000, help="requests of a row")
    parser.add_argument("--bytes", type=int, default=322_957, help="the size of an object")
    parser.add_argument("--sign", choices=("call", "ahead"), default="ahead")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row instead")
    parser.add_argument("--pid", type=int, help="the server's process, to read its CPU time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
