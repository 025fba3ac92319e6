"""The contenders: kvio, each library called directly as kvio configures it, and with its defaults.

Every read ends in the caller's memory. Client processes import this module, so it imports little.
"""

from __future__ import annotations

import io
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self
from urllib.parse import quote, urlsplit

import kvio
from benchmarks.harness.s3_libraries import LIBRARIES
from kvio import MiB

PUT: Final = "PUT"
GET: Final = "GET"
RANGE: Final = "range GET"
HEAD: Final = "HEAD"
LIST: Final = "LIST"
#: In this order: the later ones need what the first has stored.
OPERATIONS: Final = (PUT, GET, RANGE, HEAD, LIST)

KINDS: Final = ("kvio", "kvio block", "direct", "defaults")
#: The raw client, signed in advance: the most that server and machine can do.
FLOOR: Final = "floor"
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (FLOOR, *(f"{library} {kind}" for library in LIBRARIES for kind in KINDS))

#: Objects of one folder; LIST asks for the first folder.
FOLDER_OBJECTS: Final = 100
#: What kvio's block layout adds to each object.
TRAILER_NBYTES: Final = 64
#: What kvio and a library called directly send in one request, at least.
PART_BYTES: Final = 8 * MiB
CONNECTIONS: Final = 64
_CONNECT_S: Final = 5.0
_READ_S: Final = 30.0


def library_of(contender: str) -> str:
    """Return ``boto3`` of ``boto3 kvio block``; the floor is a library of its own."""
    return contender.partition(" ")[0]


def kind_of(contender: str) -> str:
    """Return ``kvio block`` of ``boto3 kvio block``."""
    return contender.partition(" ")[2] or FLOOR


def signing_options(library: str, *, unsigned: bool) -> dict[str, Any]:
    """Return options of a store that hashes no body, where the library leaves the choice."""
    return {"payload_signing": "unsigned"} if unsigned and library not in ("minio", "torch") else {}


def direct_options(part_bytes: int) -> dict[str, Any]:
    """Return options of a store that does as a direct call: no checksum, one request an object.

    It has no deadline but the library's own.
    """
    return {"checksum": "none", "part_bytes": part_bytes, "request_timeout_s": math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One load of one process; it holds no credentials.

    Attributes:
        prefix: what the names of its objects begin with; no other process uses it.
        payload: a file of *distinct* payloads of *nbytes* each, one after the other.
        count: objects, at most.
        threads: calls at the same time.
        unsigned: bodies are not hashed, where that can be chosen.
        limit_s: no call of an operation begins later than this.
    """

    contender: str
    endpoint: str
    bucket: str
    region: str
    prefix: str
    payload: str
    distinct: int
    nbytes: int
    count: int
    threads: int
    operations: tuple[str, ...]
    unsigned: bool
    limit_s: float

    @property
    def part_bytes(self) -> int:
        """The part size with which each object here is one request."""
        return max(PART_BYTES, self.nbytes)

    @property
    def connections(self) -> int:
        """The size of a pool: kvio's default, but no fewer than the threads."""
        return max(CONNECTIONS, self.threads)

    @property
    def extent(self) -> tuple[int, int]:
        """Start and length of a range GET: the second quarter."""
        return self.nbytes // 4, max(1, self.nbytes // 4)

    @property
    def folder(self) -> str:
        """The prefix that LIST asks for."""
        return f"{self.prefix}/o00000/"

    def key(self, index: int) -> str:
        """Name an object."""
        folder, name = divmod(index, FOLDER_OBJECTS)
        return f"{self.prefix}/o{folder:05d}/{name:02d}"

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Make one of what JSON made of its fields."""
        return cls(**{**fields, "operations": tuple(fields["operations"])})


class Caller(Protocol):
    """Five calls; each may be made from several threads."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""

    def get(self, key: str, out: bytearray) -> int:
        """Read a whole object into *out*."""

    def get_range(self, key: str, out: bytearray, start: int) -> int:
        """Read ``len(out)`` bytes from *start* into *out*."""

    def head(self, key: str) -> int:
        """Return the length of what was put."""

    def names(self, prefix: str) -> int:
        """Count the names below a prefix."""

    def prepare(self, operation: str, keys: Sequence[str]) -> None:
        """Do what may be done before the clock starts."""


def connect(spec: JobSpec) -> Caller:
    """Make the contender of a job spec ready.

    Raises:
        ImportError, kvio.KvioError: it cannot be used here.
    """
    if spec.contender == FLOOR:
        return _Floor(spec)
    library, kind = library_of(spec.contender), kind_of(spec.contender)
    if kind.startswith("kvio"):
        return _Kvio(spec, library, block=kind == "kvio block")
    made: Callable[[JobSpec, bool], Caller] = _CALLED_DIRECTLY[library]
    return made(spec, kind == "direct")


class _Ready:
    """Needs no preparation."""

    def prepare(self, operation: str, keys: Sequence[str]) -> None:
        """Do nothing."""


class _Kvio(_Ready):
    """A store: plain objects in one request each, or as it is by default."""

    def __init__(self, spec: JobSpec, library: str, *, block: bool) -> None:
        options: dict[str, Any] = {"endpoint_url": spec.endpoint, "region": spec.region}
        options |= signing_options(library, unsigned=spec.unsigned)
        options["connections"] = spec.connections
        if not block:
            options |= direct_options(spec.part_bytes)
        url = f"s3+{library}://{spec.bucket}"
        self._store = kvio.open_store(url, layout="block" if block else "plain", options=options)

    def put(self, key: str, data: bytes) -> None:
        self._store.write_block(key, data, if_exists="replace")

    def get(self, key: str, out: bytearray) -> int:
        return self._store.read_block_into(key, out)

    def get_range(self, key: str, out: bytearray, start: int) -> int:
        return self._store.read_block_into(key, out, offset=start, nbytes=len(out))

    def head(self, key: str) -> int:
        return self._store.stat_block(key).nbytes

    def names(self, prefix: str) -> int:
        return sum(1 for _ in self._store.list_keys(prefix))


class _Boto3(_Ready):
    def __init__(self, spec: JobSpec, tuned: bool) -> None:  # noqa: FBT001  # as all of its kind
        import boto3
        from botocore.config import Config

        self._bucket = spec.bucket
        self._pages: Any = None
        if not tuned:
            self._client = boto3.client("s3", endpoint_url=spec.endpoint)
            return
        config = Config(
            s3={"addressing_style": "path", "payload_signing_enabled": not spec.unsigned},
            max_pool_connections=spec.connections,
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            tcp_keepalive=True,
        )
        self._client = boto3.session.Session().client(
            "s3", endpoint_url=spec.endpoint, region_name=spec.region, config=config
        )
        self._client.meta.events.register("before-send.s3", _send_at_once)
        self._pages = self._client.get_paginator("list_objects_v2")  # to make one takes 20 ms

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def get(self, key: str, out: bytearray) -> int:
        return self._fill(out, Key=key)

    def get_range(self, key: str, out: bytearray, start: int) -> int:
        return self._fill(out, Key=key, Range=f"bytes={start}-{start + len(out) - 1}")

    def _fill(self, out: bytearray, **request: Any) -> int:
        body = self._client.get_object(Bucket=self._bucket, **request)["Body"]
        view, got = memoryview(out), 0
        while got < len(out) and (nbytes := body.readinto(view[got:])):
            got += nbytes
        body.close()
        return got

    def head(self, key: str) -> int:
        return int(self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"])

    def names(self, prefix: str) -> int:
        pages = self._pages or self._client.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self._bucket, Prefix=prefix)
        return sum(len(page.get("Contents", ())) for page in found)


def _send_at_once(request: Any, **_: Any) -> None:
    if "Expect" in request.headers:
        del request.headers["Expect"]


class _Minio(_Ready):
    def __init__(self, spec: JobSpec, tuned: bool) -> None:  # noqa: FBT001
        import urllib3
        from minio import Minio
        from minio.credentials.providers import EnvAWSProvider

        parts = urlsplit(spec.endpoint)
        self._bucket = spec.bucket
        configured: dict[str, Any] = {}
        if tuned:
            timeout = urllib3.Timeout(connect=_CONNECT_S, read=_READ_S)
            pool = urllib3.PoolManager(maxsize=spec.connections, timeout=timeout, retries=False)
            configured = {"http_client": pool, "region": spec.region}
        self._client = Minio(
            parts.netloc, secure=parts.scheme == "https", credentials=EnvAWSProvider(), **configured
        )

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(self._bucket, key, io.BytesIO(data), len(data))

    def get(self, key: str, out: bytearray) -> int:
        return self._fill(out, key)

    def get_range(self, key: str, out: bytearray, start: int) -> int:
        return self._fill(out, key, offset=start, length=len(out))

    def _fill(self, out: bytearray, key: str, **extent: Any) -> int:
        answer = self._client.get_object(self._bucket, key, **extent)
        try:
            return _deliver(answer.read(), out)
        finally:
            answer.close()
            answer.release_conn()

    def head(self, key: str) -> int:
        return int(self._client.stat_object(self._bucket, key).size or 0)

    def names(self, prefix: str) -> int:
        return sum(1 for _ in self._client.list_objects(self._bucket, prefix, recursive=True))


class _Obstore(_Ready):
    def __init__(self, spec: JobSpec, tuned: bool) -> None:  # noqa: FBT001
        from obstore.store import S3Store

        self._tuned: dict[str, Any] = {"use_multipart": False} if tuned else {}
        given: dict[str, Any] = {"client_options": {"allow_http": True}}
        if tuned:
            given = {
                "virtual_hosted_style_request": False,
                "unsigned_payload": spec.unsigned,
                "retry_config": {"max_retries": 0},
                "client_options": {
                    "allow_http": True,
                    "connect_timeout": f"{_CONNECT_S}s",
                    "read_timeout": f"{_READ_S}s",
                    "timeout": "300s",
                    "pool_max_idle_per_host": str(spec.connections),
                },
            }
        self._store = S3Store(spec.bucket, endpoint=spec.endpoint, region=spec.region, **given)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data, **self._tuned)

    def get(self, key: str, out: bytearray) -> int:
        return _deliver(self._store.get(key).buffer(), out)

    def get_range(self, key: str, out: bytearray, start: int) -> int:
        return _deliver(self._store.get_range(key, start=start, length=len(out)), out)

    def head(self, key: str) -> int:
        return int(self._store.head(key)["size"])

    def names(self, prefix: str) -> int:
        return sum(len(page) for page in self._store.list(prefix.rstrip("/")))


class _S3dlio(_Ready):
    def __init__(self, spec: JobSpec, tuned: bool) -> None:  # noqa: FBT001
        os.environ["AWS_ENDPOINT_URL"] = spec.endpoint
        if tuned:  # read once, when it is first used
            os.environ |= {
                "S3DLIO_UNSIGNED_PAYLOAD": str(int(spec.unsigned)),
                "S3DLIO_ENABLE_RANGE_OPTIMIZATION": "0",
                "S3DLIO_RT_THREADS": str(len(os.sched_getaffinity(0))),
                "S3DLIO_MAX_RETRY_ATTEMPTS": "1",
                "S3DLIO_CONNECT_TIMEOUT_SECS": f"{_CONNECT_S:.0f}",
                "S3DLIO_OPERATION_TIMEOUT_SECS": f"{_READ_S:.0f}",
                "S3DLIO_POOL_MAX_IDLE_PER_HOST": str(spec.connections),
            }
        import s3dlio

        self._library = s3dlio
        self._base = f"s3://{spec.bucket}/"

    def put(self, key: str, data: bytes) -> None:
        self._library.put_bytes(self._base + key, data)

    def get(self, key: str, out: bytearray) -> int:
        return _deliver(self._library.get(self._base + key), out)

    def get_range(self, key: str, out: bytearray, start: int) -> int:
        return _deliver(self._library.get_range(self._base + key, start, len(out)), out)

    def head(self, key: str) -> int:
        return int(self._library.stat(self._base + key)["size"])

    def names(self, prefix: str) -> int:
        return len(self._library.list(self._base + prefix, recursive=True))


class _Torch(_Ready):
    def __init__(self, spec: JobSpec, tuned: bool) -> None:  # noqa: FBT001
        from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

        self._bucket = spec.bucket
        configured: dict[str, Any] = {}
        if tuned:
            part_size = spec.part_bytes + TRAILER_NBYTES + 1
            configured = {"max_attempts": 2, "part_size": part_size}
        self._client = MountpointS3Client(
            spec.region, endpoint=spec.endpoint, force_path_style=True, **configured
        )

    def put(self, key: str, data: bytes) -> None:
        stream = self._client.put_object(self._bucket, key)
        stream.write(data)
        stream.close()

    def get(self, key: str, out: bytearray) -> int:
        return _deliver_all(self._client.get_object(self._bucket, key), out)

    def get_range(self, key: str, out: bytearray, start: int) -> int:
        stop = start + len(out)
        return _deliver_all(self._client.get_object(self._bucket, key, start, stop), out)

    def head(self, key: str) -> int:
        return int(self._client.head_object(self._bucket, key).size)

    def names(self, prefix: str) -> int:
        pages = self._client.list_objects(self._bucket, prefix)
        return sum(len(page.object_info) for page in pages)


class _Floor:
    """Raw sockets; every request is made and signed before the clock starts."""

    def __init__(self, spec: JobSpec) -> None:
        # Only here: the time of a whole process is measured, too.
        from benchmarks.harness.s3_server import endpoint_of
        from benchmarks.s3mem.rawcalls import Connection, Signer

        self._spec = spec
        endpoint = endpoint_of(spec.endpoint, spec.region, os.environ)
        self._new_signer = partial(Signer, endpoint)  # one is for one thread
        self._connect = partial(Connection, endpoint)
        self._heads: dict[str, bytes] = {}
        self._idle: deque[tuple[Any, memoryview]] = deque()

    def prepare(self, operation: str, keys: Sequence[str]) -> None:
        signer, spec = self._new_signer(), self._spec
        start, length = spec.extent
        for key in keys:
            path = quote(f"/{spec.bucket}/{key}", safe="/~")
            if operation == PUT:
                head = signer.head("PUT", path, length=spec.nbytes)
            elif operation == RANGE:
                extent = {"range": f"bytes={start}-{start + length - 1}"}
                head = signer.head("GET", path, headers=extent)
            elif operation == LIST:
                query = f"list-type=2&max-keys=1000&prefix={quote(key, safe='')}"
                head = signer.head("GET", f"/{spec.bucket}", query=query)
            else:
                head = signer.head("HEAD" if operation == HEAD else "GET", path)
            self._heads[operation + key] = head

    def put(self, key: str, data: bytes) -> None:
        head = self._heads.get(PUT + key)
        if head is None:  # to warm up
            path = quote(f"/{self._spec.bucket}/{key}", safe="/~")
            head = self._new_signer().head("PUT", path, length=len(data))
        self._exchange(head, data, None)

    def get(self, key: str, out: bytearray) -> int:
        return self._exchange(self._heads[GET + key], None, out)[0]

    def get_range(self, key: str, out: bytearray, start: int) -> int:  # noqa: ARG002
        return self._exchange(self._heads[RANGE + key], None, out)[0]

    def head(self, key: str) -> int:
        answer = self._exchange(self._heads[HEAD + key], None, None, has_body=False)[1].lower()
        return int(answer.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])

    def names(self, prefix: str) -> int:
        page = bytearray(1 << 17)
        nbytes, _ = self._exchange(self._heads[LIST + prefix], None, page)
        return page.count(b"<Key>", 0, nbytes)

    def _exchange(
        self, head: Any, body: bytes | None, out: bytearray | None, *, has_body: bool = True
    ) -> tuple[int, bytes]:
        try:
            connection, scratch = self._idle.pop()
        except IndexError:
            connection = self._connect()
            scratch = memoryview(bytearray(1 << 16))
        connection.send(head, body)
        target = scratch if out is None else memoryview(out)
        status, found, nbytes = connection.receive_into(target, has_body=has_body)
        self._idle.append((connection, scratch))
        if status >= 300:
            raise OSError(f"the server answers {status}")
        return nbytes, found


def _deliver(answer: Any, out: bytearray) -> int:
    """Copy a library's answer into the caller's memory; too long an answer is an error."""
    nbytes = len(memoryview(answer))
    memoryview(out)[:nbytes] = memoryview(answer)
    return nbytes


def _deliver_all(answers: Any, out: bytearray) -> int:
    view, got = memoryview(out), 0
    for piece in answers:
        view[got : got + len(piece)] = piece
        got += len(piece)
    return got


_CALLED_DIRECTLY: Final[dict[str, Any]] = {
    "boto3": _Boto3,
    "minio": _Minio,
    "obstore": _Obstore,
    "s3dlio": _S3dlio,
    "torch": _Torch,
}
