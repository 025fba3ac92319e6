"""The contenders: kvio, each library by hand as kvio configures it, and as a newcomer calls it.

Reads end in the caller's memory, whoever makes them.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import kvio
from kvio.experiments.s3 import raw
from kvio.experiments.s3.options import as_by_hand, signing
from kvio.experiments.s3.order import FLOOR, GET, HEAD, LIST, PUT, RANGE, Order, kind_of, library_of

#: Where the raw client is found by a client process; see `kvio.experiments.s3.raw`.
RAW_CLIENT: Final = "KVIO_S3_RAW_CLIENT"
_CONNECT_S: Final = 5.0
_READ_S: Final = 30.0
_TRAILER_NBYTES: Final = 64


class Caller(Protocol):
    """Five calls; each may be made from several threads."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""

    def get(self, key: str, out: bytearray) -> int:
        """Read a whole object into *out*."""

    def get_range(self, key: str, out: bytearray, start: int) -> int:
        """Read ``len(out)`` bytes from *start* into *out*."""

    def head(self, key: str) -> int:
        """Give the length of what was put."""

    def names(self, prefix: str) -> int:
        """Count the names below a prefix."""

    def prepare(self, operation: str, keys: Sequence[str]) -> None:
        """Do what may be done before the clock starts."""


def connect(order: Order) -> Caller:
    """Make an order's contender ready.

    Raises:
        ImportError, kvio.KvioError: it cannot be used here.
    """
    if order.contender == FLOOR:
        return _Floor(order)
    library, kind = library_of(order.contender), kind_of(order.contender)
    if kind.startswith("kvio"):
        return _Kvio(order, library, block=kind == "kvio block")
    made: Callable[[Order, bool], Caller] = _BY_HAND[library]
    return made(order, kind == "direct")


class _Ready:
    """Needs no preparation."""

    def prepare(self, operation: str, keys: Sequence[str]) -> None:
        """Do nothing."""


class _Kvio(_Ready):
    """A store: plain objects in one request each, or as it is by default."""

    def __init__(self, order: Order, library: str, *, block: bool) -> None:
        options: dict[str, Any] = {"endpoint_url": order.endpoint, "region": order.region}
        options |= signing(library, unsigned=order.unsigned)
        options["connections"] = order.connections
        if not block:
            options |= as_by_hand(order.part_bytes)
        url = f"s3+{library}://{order.bucket}"
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
    def __init__(self, order: Order, tuned: bool) -> None:  # noqa: FBT001  # as all of its kind
        import boto3
        from botocore.config import Config

        self._bucket = order.bucket
        self._pages: Any = None
        if not tuned:
            self._client = boto3.client("s3", endpoint_url=order.endpoint)
            return
        config = Config(
            s3={"addressing_style": "path", "payload_signing_enabled": not order.unsigned},
            max_pool_connections=order.connections,
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            tcp_keepalive=True,
        )
        self._client = boto3.session.Session().client(
            "s3", endpoint_url=order.endpoint, region_name=order.region, config=config
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
    def __init__(self, order: Order, tuned: bool) -> None:  # noqa: FBT001
        import urllib3
        from minio import Minio
        from minio.credentials.providers import EnvAWSProvider

        parts = urlsplit(order.endpoint)
        self._bucket = order.bucket
        configured: dict[str, Any] = {}
        if tuned:
            timeout = urllib3.Timeout(connect=_CONNECT_S, read=_READ_S)
            pool = urllib3.PoolManager(maxsize=order.connections, timeout=timeout, retries=False)
            configured = {"http_client": pool, "region": order.region}
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
    def __init__(self, order: Order, tuned: bool) -> None:  # noqa: FBT001
        from obstore.store import S3Store

        self._tuned: dict[str, Any] = {"use_multipart": False} if tuned else {}
        given: dict[str, Any] = {"client_options": {"allow_http": True}}
        if tuned:
            given = {
                "virtual_hosted_style_request": False,
                "unsigned_payload": order.unsigned,
                "retry_config": {"max_retries": 0},
                "client_options": {
                    "allow_http": True,
                    "connect_timeout": f"{_CONNECT_S}s",
                    "read_timeout": f"{_READ_S}s",
                    "timeout": "300s",
                    "pool_max_idle_per_host": str(order.connections),
                },
            }
        self._store = S3Store(order.bucket, endpoint=order.endpoint, region=order.region, **given)

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
    def __init__(self, order: Order, tuned: bool) -> None:  # noqa: FBT001
        os.environ["AWS_ENDPOINT_URL"] = order.endpoint
        if tuned:  # read once, when it is first used
            os.environ |= {
                "S3DLIO_UNSIGNED_PAYLOAD": str(int(order.unsigned)),
                "S3DLIO_ENABLE_RANGE_OPTIMIZATION": "0",
                "S3DLIO_RT_THREADS": str(len(os.sched_getaffinity(0))),
                "S3DLIO_MAX_RETRY_ATTEMPTS": "1",
                "S3DLIO_CONNECT_TIMEOUT_SECS": f"{_CONNECT_S:.0f}",
                "S3DLIO_OPERATION_TIMEOUT_SECS": f"{_READ_S:.0f}",
                "S3DLIO_POOL_MAX_IDLE_PER_HOST": str(order.connections),
            }
        import s3dlio

        self._library = s3dlio
        self._base = f"s3://{order.bucket}/"

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
    def __init__(self, order: Order, tuned: bool) -> None:  # noqa: FBT001
        from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

        self._bucket = order.bucket
        configured: dict[str, Any] = {}
        if tuned:
            part_size = order.part_bytes + _TRAILER_NBYTES + 1
            configured = {"max_attempts": 2, "part_size": part_size}
        self._client = MountpointS3Client(
            order.region, endpoint=order.endpoint, force_path_style=True, **configured
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

    def __init__(self, order: Order) -> None:
        self._raw = raw.load(Path(os.environ[RAW_CLIENT]))
        self._order = order
        self._endpoint = raw.endpoint(self._raw, order.endpoint, order.region, os.environ)
        self._heads: dict[str, bytes] = {}
        self._idle: deque[tuple[Any, memoryview]] = deque()

    def prepare(self, operation: str, keys: Sequence[str]) -> None:
        signer, order = self._raw.Signer(self._endpoint), self._order
        quote = self._raw.quote
        start, length = order.extent
        for key in keys:
            path = quote(f"/{order.bucket}/{key}", safe="/~")
            if operation == PUT:
                head = signer.head("PUT", path, length=order.nbytes)
            elif operation == RANGE:
                extent = {"range": f"bytes={start}-{start + length - 1}"}
                head = signer.head("GET", path, headers=extent)
            elif operation == LIST:
                query = f"list-type=2&max-keys=1000&prefix={quote(key, safe='')}"
                head = signer.head("GET", f"/{order.bucket}", query=query)
            else:
                head = signer.head("HEAD" if operation == HEAD else "GET", path)
            self._heads[operation + key] = head

    def put(self, key: str, data: bytes) -> None:
        if len(data) == self._order.nbytes:
            self._exchange(self._heads.get(PUT + key), data, None)
        else:  # to warm up
            path = self._raw.quote(f"/{self._order.bucket}/{key}", safe="/~")
            signer = self._raw.Signer(self._endpoint)
            self._exchange(signer.head("PUT", path, length=len(data)), data, None)

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
            connection = self._raw.Connection(self._endpoint)
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


_BY_HAND: Final[dict[str, Any]] = {
    "boto3": _Boto3,
    "minio": _Minio,
    "obstore": _Obstore,
    "s3dlio": _S3dlio,
    "torch": _Torch,
}
