"""S3 over a network: batches and a large object, kvio by default beside the libraries' own ways.

The server is `benchmarks.s3mem` behind a simulated network: every request takes a round trip, and
every connection has a rate. All contenders run in one process, kvio with no option but the
server's.
"""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import kvio
from benchmarks.harness import columns
from benchmarks.harness.columns import table_of
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import WRITE, Sample, Summary
from benchmarks.harness.plot import draw_bars
from benchmarks.harness.run import Limits, Run, Scenario, check_least, check_names
from benchmarks.harness.s3_libraries import LIBRARIES, missing, versions
from benchmarks.harness.s3_server import Server, in_memory, storage_of
from benchmarks.harness.table import Table
from kvio import KiB, MiB

READ: Final = "read"
KVIO: Final = tuple(f"kvio {library}" for library in LIBRARIES)
ASYNC: Final = "obstore async"
MANY: Final = "s3dlio many"
TRANSFER: Final = "boto3 transfer"
OWN: Final = (ASYNC, MANY, TRANSFER)
CONTENDERS: Final = (*KVIO, *OWN)

_BUCKET: Final = "kvio-network"
_SMALL: Final = 64 * KiB
#: What boto3's own transfers run at once.
_TRANSFERS: Final = 10

SCENARIO: Final = Scenario(
    name="s3-network",
    title="S3 over a simulated network: kvio by default, and the libraries' own ways",
    reference=ASYNC,
    contenders=CONTENDERS,
    claims=(
        Claim(
            text="batches by kvio's default library take the time of obstore's async",
            pairs=[("kvio obstore", ASYNC)],
            at_least=0.9,
            where=lambda sample: sample.subject.startswith("batch"),
        ),
        Claim(
            text="a large object by kvio's default library is as fast as by any library's own way",
            pairs=[("kvio obstore", own) for own in OWN],
            at_least=0.9,
            where=lambda sample: sample.subject.startswith("one"),
        ),
        Claim(
            text="kvio over a library is as fast as that library's own way",
            pairs=[("kvio s3dlio", MANY), ("kvio boto3", TRANSFER)],
            at_least=1.0,
        ),
    ),
)


class Load(NamedTuple):
    """Objects that are written and then read, all at once."""

    objects: int
    nbytes: int

    def __str__(self) -> str:
        return f"batch of {self.objects}" if self.objects > 1 else "one object"


class Way(Protocol):
    """How a contender writes and reads."""

    def write(self, names: Sequence[str], data: bytes) -> None:
        """Store the same bytes under every name."""

    def read(self, names: Sequence[str], room: Sequence[memoryview]) -> None:
        """Fill the caller's memory with the objects."""


def run(
    limits: Limits,
    *,
    contenders: Sequence[str] = CONTENDERS,
    objects: int = 400,
    large_bytes: int = 128 * MiB,
    round_trip_ms: float = 20.0,
    connection_mib_s: float = 20.0,
) -> int:
    """Write and read with every contender, and print, write and plot what was found.

    Args:
        limits: how much; the directory is not used.
        contenders: names of `CONTENDERS`.
        objects: how many of 64 KiB a batch has.
        large_bytes: the length of the large object; 0: none.
        round_trip_ms: of each request, and of each new connection.
        connection_mib_s: MiB/s of each connection; 0: no limit.

    Returns:
        The exit status: 0; 1 if a byte differed; 130 after Ctrl-C.

    Raises:
        ConfigError: a name or a number cannot be.
    """
    check_names("contender", contenders, CONTENDERS)
    check_least(**{"--objects": objects})
    loads = [Load(objects, _SMALL), *([Load(1, large_bytes)] if large_bytes else [])]
    options = {
        "contenders": list(contenders),
        "round_trip_ms": round_trip_ms,
        "connection_mib_s": connection_mib_s,
    }
    this = Run(SCENARIO, limits, {**options, "versions": versions([*LIBRARIES.values()])})
    for name in contenders:
        if why := missing(_library_of(name)):
            this.left_out[name] = why
    reserve = 2 * max(load.objects * load.nbytes for load in loads) * len(contenders)
    with (
        in_memory(
            _BUCKET, reserve, round_trip_ms=round_trip_ms, connection_mib_s=connection_mib_s
        ) as server,
        ExitStack() as stack,
    ):
        inspector = server.inspector()
        inspector.make_bucket()
        inspector.close()
        this.file_system = storage_of(server)
        this.take_trials(loads, contenders, _Trials(server, stack).take)
        return this.finish(_notes(round_trip_ms, connection_mib_s), _tables, draw_bars)


def _library_of(contender: str) -> str:
    first, second = contender.split(" ")
    return second if first == "kvio" else first


class _Trials:
    """The contenders, each connected once, as in a program."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self._server, self._stack = server, stack
        self._ways: dict[str, Way] = {}

    def _way(self, name: str) -> Way:
        if name not in self._ways:
            self._ways[name] = _connect(name, self._server, self._stack)
        return self._ways[name]

    def take(self, load: Load, name: str, index: int) -> Iterator[Sample]:
        """Write a load over that of the round before, and read it."""
        way = self._way(name)
        names = [
            f"{name.replace(' ', '-')}/{load.nbytes}/{number}" for number in range(load.objects)
        ]
        data = os.urandom(load.nbytes)
        room = [memoryview(bytearray(load.nbytes)) for _ in names]
        for operation, call in (
            (WRITE, partial(way.write, names, data)),
            (READ, partial(way.read, names, room)),
        ):
            wall, cpu = _time(call)
            yield Sample(
                subject=str(load),
                block_nbytes=load.nbytes,
                contender=name,
                checksum=name in KVIO,
                operation=operation,
                round=index,
                wall_s=wall,
                latencies_s=[wall / load.objects] * load.objects,
                intact=all(one == data for one in room) if operation == READ else None,
                facts={"cpu_s": cpu, "wall_s": wall},
            )


def _time(call: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _connect(name: str, server: Server, stack: ExitStack) -> Way:
    keys = server.environ["AWS_ACCESS_KEY_ID"], server.environ["AWS_SECRET_ACCESS_KEY"]
    if name in KVIO:
        store = kvio.open_store(
            f"s3+{_library_of(name)}://{server.bucket}",
            options={
                "endpoint_url": server.url,
                "region": server.region,
                "access_key": keys[0],
                "secret_key": keys[1],
            },
        )
        stack.enter_context(store)
        return _Kvio(store)
    if name == ASYNC:
        return _Obstore(server, *keys)
    if name == TRANSFER:
        return _Boto3(server, *keys)
    return _S3dlio(server, *keys)


@dataclass(frozen=True)
class _Kvio:
    store: kvio.Store

    def write(self, names: Sequence[str], data: bytes) -> None:
        if len(names) == 1:
            self.store.write_block(names[0], data, if_exists="replace")
            return
        results = self.store.write_blocks([(name, data) for name in names], if_exists="replace")
        assert all(result.ok for result in results)

    def read(self, names: Sequence[str], room: Sequence[memoryview]) -> None:
        if len(names) == 1:
            self.store.read_block_into(names[0], room[0])
            return
        results = self.store.read_blocks_into(zip(names, room, strict=True))
        assert all(result.ok for result in results)


class _Obstore:
    """All requests of a batch at once; a large object in parts and ranges of 8 MiB."""

    _PART_BYTES: Final = 8 * MiB

    def __init__(self, server: Server, access: str, secret: str) -> None:
        from obstore.store import S3Store

        self._store = S3Store(
            server.bucket,
            endpoint=server.url,
            region=server.region,
            access_key_id=access,
            secret_access_key=secret,
            client_options={"allow_http": True},
        )

    def write(self, names: Sequence[str], data: bytes) -> None:
        async def put() -> None:
            put_async: Any = self._store.put_async
            await asyncio.gather(*[put_async(name, data, max_concurrency=16) for name in names])

        asyncio.run(put())

    def read(self, names: Sequence[str], room: Sequence[memoryview]) -> None:
        async def fill(name: str, out: memoryview, start: int) -> None:
            stop = min(len(out), start + self._PART_BYTES)
            out[start:stop] = await self._store.get_range_async(name, start=start, end=stop)

        async def get() -> None:
            await asyncio.gather(
                *[
                    fill(name, out, start)
                    for name, out in zip(names, room, strict=True)
                    for start in range(0, len(out), self._PART_BYTES)
                ]
            )

        asyncio.run(get())


class _Boto3:
    """Its transfers with their defaults: parts of 8 MiB, ten at once."""

    def __init__(self, server: Server, access: str, secret: str) -> None:
        import boto3

        self._bucket = server.bucket
        self._client = boto3.client(
            "s3",
            endpoint_url=server.url,
            region_name=server.region,
            aws_access_key_id=access,
            aws_secret_access_key=secret,
        )

    def write(self, names: Sequence[str], data: bytes) -> None:
        def upload(name: str) -> None:
            self._client.upload_fileobj(io.BytesIO(data), self._bucket, name)

        with ThreadPoolExecutor(_TRANSFERS) as pool:
            list(pool.map(upload, names))

    def read(self, names: Sequence[str], room: Sequence[memoryview]) -> None:
        def download(name: str, out: memoryview) -> None:
            whole = io.BytesIO()
            self._client.download_fileobj(self._bucket, name, whole)
            out[:] = whole.getbuffer()

        with ThreadPoolExecutor(_TRANSFERS) as pool:
            list(pool.map(download, names, room))


class _S3dlio:
    """Its batches, 64 requests at once; it knows one server a process, kvio's too."""

    def __init__(self, server: Server, access: str, secret: str) -> None:
        import s3dlio

        for variable, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_REGION": server.region,
            "AWS_ACCESS_KEY_ID": access,
            "AWS_SECRET_ACCESS_KEY": secret,
        }.items():
            os.putenv(variable, value)
        self._s3dlio: Any = s3dlio
        self._uri = f"s3://{server.bucket}/".__add__

    def write(self, names: Sequence[str], data: bytes) -> None:
        self._s3dlio.put_many([(self._uri(name), data) for name in names])

    def read(self, names: Sequence[str], room: Sequence[memoryview]) -> None:
        found = dict(self._s3dlio.get_many([self._uri(name) for name in names]))
        for name, out in zip(names, room, strict=True):
            out[:] = memoryview(found[self._uri(name)])


def _notes(round_trip_ms: float, connection_mib_s: float) -> list[str]:
    rate = f"{connection_mib_s:g} MiB/s a connection" if connection_mib_s else "no limit of rate"
    return [
        f"a server in memory on this machine behind a simulated network: {round_trip_ms:g} ms for "
        f"each request and each new connection, {rate}; it uses this machine's processors",
        "kvio: the defaults of each backend, with checksums; every read is compared outside what "
        "is timed",
        f"{ASYNC}: gather of all requests, parts and ranges of 8 MiB; {MANY}: put_many and "
        f"get_many; {TRANSFER}: upload_fileobj and download_fileobj, {_TRANSFERS} objects at once",
    ]


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    shown = {
        "load": columns.SUBJECT,
        "of": columns.SIZE,
        "contender": columns.CONTENDER,
        "rounds": columns.ROUNDS,
        "s": columns.fact("wall_s", ".3f"),
        "MB/s": columns.SPEED,
        "CPU s": columns.fact("cpu_s"),
        f"/ {ASYNC}": columns.RATIO,
    }
    return [
        table_of(operation, own, samples, shown, left=("load", "contender"))
        for operation in (WRITE, READ)
        if (own := [s for s in summaries if s.operation == operation])
    ]
