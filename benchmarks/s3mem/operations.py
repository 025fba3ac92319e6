"""What each request does to the buckets and objects, and what is answered."""

from __future__ import annotations

import re
import time
from typing import Final

from benchmarks.s3mem import documents, multipart, objects
from benchmarks.s3mem.errors import S3Error
from benchmarks.s3mem.objects import MOST_PARTS, Conditions, StoredObject
from benchmarks.s3mem.service import Call, Operation, Service, conditions, kept_headers, number
from benchmarks.s3mem.wire import Connection, Reply, Request

_RANGE: Final = re.compile(r"bytes=(?:(\d{1,19})-(\d{0,19})|-(\d{1,19}))")
_MOST_LISTED: Final = 1000
#: Queries that change nothing of what a request does.
_IGNORED: Final = frozenset(("x-id",))


def answer(service: Service, connection: Connection, request: Request) -> Reply:
    """Do what a request asks; a refusal is an answer too."""
    try:
        signed = service.verifier.verify(request, time.time())
        bucket, key = _address(request, service.behaviour.domain)
        call = Call(connection, request, signed, bucket, key)
        return _operation(call)(service, call)
    except S3Error as error:
        return documents.refusal(error, request.path)


def _address(request: Request, domain: str) -> tuple[str, str]:
    """Return bucket and key, from the host's name or from the path."""
    path = request.path.removeprefix("/")
    if domain:
        host = request.headers.get("host", "").partition(":")[0]
        bucket = host.removesuffix(f".{domain}")
        if bucket != host:
            return bucket, path
    bucket, _, key = path.partition("/")
    return bucket, key


def _operation(call: Call) -> Operation:
    request = call.request
    names = {name for name, _ in request.query if not name.startswith("X-Amz-")} - _IGNORED
    if call.key:
        objects.check_key(call.key)
        if names == {"partNumber"} and request.method in ("GET", "HEAD"):
            found: Operation | None = _get
        elif "uploadId" in names or "uploads" in names:
            found = multipart.OPERATIONS.get((request.method, frozenset(names) & multipart.NAMES))
        else:
            found = None if names else _OF_OBJECTS.get(request.method)
    elif call.bucket:
        if request.method == "GET":
            found = _listing(names)
        else:
            found = _OF_BUCKETS.get((request.method, frozenset(names)))
    else:
        found = _list_buckets if request.method == "GET" else None
    if found is None:
        raise S3Error("NotImplemented" if names else "MethodNotAllowed")
    return found


def _listing(names: set[str]) -> Operation | None:
    if "location" in names:
        return _location
    if "uploads" in names:
        return multipart.list_uploads
    return _list if names <= _OF_LISTINGS else None


def _put(service: Service, call: Call) -> Reply:
    if "x-amz-copy-source" in call.request.headers:
        raise S3Error("NotImplemented", "CopyObject is not implemented.")
    bucket = service.buckets.get(call.bucket)
    wanted = conditions(call.request)
    if wanted != Conditions():  # before the body is sent, and again when it is here
        wanted.check(bucket.objects.get(call.key))
    piece, held = service.piece(call)
    etag = service.buckets.tag(piece)
    found = objects.stored((piece,), etag, kept_headers(call.request), held)
    bucket.put(call.key, found, wanted)
    return Reply(200, f'ETag: "{etag}"\r\n' + "".join(f"{n}: {v}\r\n" for n, v in held.items()))


def _get(service: Service, call: Call) -> Reply:
    headers = call.request.headers
    found = service.buckets.get(call.bucket).get(call.key)
    if (wanted := headers.get("if-match")) and not objects.matches(wanted, found.etag):
        raise S3Error("PreconditionFailed")
    if (unwanted := headers.get("if-none-match")) and objects.matches(unwanted, found.etag):
        return Reply(304, f'ETag: "{found.etag}"\r\n')
    extent = _extent(call.request, found)
    if extent is not None:
        start, stop = extent
        head = f"{found.head}Content-Range: bytes {start}-{stop - 1}/{found.nbytes}\r\n"
        return Reply(206, head, found.views(start, stop), stop - start, found)
    head = found.head
    if found.checksums and headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
        head += "".join(f"{name}: {value}\r\n" for name, value in found.checksums.items())
    return Reply(200, head, found.views(0, found.nbytes), found.nbytes, found)


def _extent(request: Request, found: StoredObject) -> tuple[int, int] | None:
    """Return the first byte asked for and the one behind the last, or None for all."""
    if request.query and (part := request.argument("partNumber")) is not None:
        return _part(number(part, MOST_PARTS), found)
    asked = _RANGE.fullmatch(request.headers.get("range", ""))
    if asked is None:
        return None
    first, last, suffix = asked.groups()
    if suffix is not None:
        start, stop = max(0, found.nbytes - int(suffix)), found.nbytes
    elif last and int(last) < int(first):
        return None  # not a range, so it is as if it were not there
    else:
        start, stop = int(first), min(int(last or found.nbytes) + 1, found.nbytes)
    if start < stop:
        return start, stop
    # s3torchconnector's client takes this for an empty object only by ActualObjectSize.
    raise S3Error(
        "InvalidRange",
        headers=f"Content-Range: bytes */{found.nbytes}\r\n",
        fields={"RangeRequested": asked[0], "ActualObjectSize": str(found.nbytes)},
    )


def _part(which: int, found: StoredObject) -> tuple[int, int] | None:
    if not 0 < which <= len(found.pieces):
        raise S3Error("InvalidPartNumber")
    start = sum(len(piece) for piece in found.pieces[: which - 1])
    return (start, start + len(found.pieces[which - 1])) if found.nbytes else None


def _delete(service: Service, call: Call) -> Reply:
    service.buckets.get(call.bucket).delete(call.key, conditions(call.request))
    return Reply(204)


def _delete_many(service: Service, call: Call) -> Reply:
    bucket = service.buckets.get(call.bucket)
    keys, is_quiet = documents.read_deletes(service.document(call))
    done, refused = [], []
    for key in keys:
        try:
            objects.check_key(key)
            bucket.delete(key)
            done.append(key)
        except S3Error as error:
            refused.append((key, error))
    return documents.deleted(() if is_quiet else done, refused)


def _create_bucket(service: Service, call: Call) -> Reply:
    service.document(call)
    service.buckets.create(call.bucket)
    return Reply(200, f"Location: /{call.bucket}\r\n")


def _delete_bucket(service: Service, call: Call) -> Reply:
    service.buckets.delete(call.bucket)
    return Reply(204)


def _head_bucket(service: Service, call: Call) -> Reply:
    service.buckets.get(call.bucket)
    return Reply(200, "x-amz-bucket-region: us-east-1\r\n")


def _list_buckets(service: Service, _: Call) -> Reply:
    return documents.buckets(service.buckets.names())


def _location(service: Service, call: Call) -> Reply:
    service.buckets.get(call.bucket)
    return documents.location()


def _list(service: Service, call: Call) -> Reply:
    bucket = service.buckets.get(call.bucket)
    asked = dict(call.request.query)
    most = number(asked.get("max-keys", str(_MOST_LISTED)), _MOST_LISTED)
    if asked.get("list-type") == "2":
        after = asked.get("start-after", "")
        if "continuation-token" in asked:
            after = documents.name_of_token(asked["continuation-token"])
    else:
        after = asked.get("marker", "")
    page = objects.page(
        bucket, prefix=asked.get("prefix", ""), delimiter=asked.get("delimiter", ""),
        after=after, most=most,
    )  # fmt: skip
    return documents.listing(bucket.name, page, asked, most=most)


_OF_LISTINGS: Final = frozenset(
    (
        "list-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after",
        "encoding-type", "marker", "fetch-owner",
    )
)  # fmt: skip
_OF_OBJECTS: Final[dict[str, Operation]] = {
    "PUT": _put, "GET": _get, "HEAD": _get, "DELETE": _delete,
}  # fmt: skip
_OF_BUCKETS: Final[dict[tuple[str, frozenset[str]], Operation]] = {
    ("PUT", frozenset()): _create_bucket,
    ("HEAD", frozenset()): _head_bucket,
    ("DELETE", frozenset()): _delete_bucket,
    ("POST", frozenset(("delete",))): _delete_many,
}
