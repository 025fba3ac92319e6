"""Uploads in parts: started, filled, listed, completed or given up."""

from __future__ import annotations

import itertools
import time
from typing import Final

from benchmarks.s3mem import documents, objects
from benchmarks.s3mem.errors import S3Error
from benchmarks.s3mem.objects import LEAST_PART_BYTES, MOST_PARTS, Part, Upload
from benchmarks.s3mem.service import Call, Operation, Service, conditions, kept_headers, number
from benchmarks.s3mem.wire import Reply

_MOST_LISTED: Final = 1000
#: The parameters of a query that say which of the operations is meant.
NAMES: Final = frozenset(("uploads", "uploadId", "partNumber"))


def _create(service: Service, call: Call) -> Reply:
    bucket = service.buckets.get(call.bucket)
    service.document(call)
    upload_id = service.buckets.upload_id()
    upload = Upload(call.key, kept_headers(call.request), time.time())
    with bucket.lock:
        bucket.uploads[upload_id] = upload
    return documents.initiated(call.bucket, call.key, upload_id)


def _put_part(service: Service, call: Call) -> Reply:
    if "x-amz-copy-source" in call.request.headers:
        raise S3Error("NotImplemented", "UploadPartCopy is not implemented.")
    bucket = service.buckets.get(call.bucket)
    upload_id = _argument(call, "uploadId")
    part_number = number(_argument(call, "partNumber"), MOST_PARTS + 1)
    if not 0 < part_number <= MOST_PARTS:
        raise S3Error("InvalidArgument", f"A part's number is 1 to {MOST_PARTS}.")
    bucket.upload(upload_id, call.key)
    piece, held = service.piece(call)
    part = Part(piece, service.buckets.tag(piece), time.time())
    with bucket.lock:
        bucket.upload(upload_id, call.key).parts[part_number] = part
    headers = "".join(f"{name}: {value}\r\n" for name, value in held.items())
    return Reply(200, f'ETag: "{part.etag}"\r\n{headers}')


def _list_parts(service: Service, call: Call) -> Reply:
    bucket = service.buckets.get(call.bucket)
    upload_id = _argument(call, "uploadId")
    asked = dict(call.request.query)
    with bucket.lock:
        found = sorted(bucket.upload(upload_id, call.key).parts.items())
    return documents.parts(
        call.bucket, call.key, upload_id, found,
        most=number(asked.get("max-parts", str(_MOST_LISTED)), _MOST_LISTED),
        after=number(asked.get("part-number-marker", "0"), MOST_PARTS),
    )  # fmt: skip


def list_uploads(service: Service, call: Call) -> Reply:
    """Answer ListMultipartUploads, by key and then by age."""
    bucket = service.buckets.get(call.bucket)
    asked = dict(call.request.query)
    prefix = asked.get("prefix", "")
    with bucket.lock:
        found = [pair for pair in bucket.uploads.items() if pair[1].key.startswith(prefix)]
    found.sort(key=lambda pair: (pair[1].key, pair[1].started))
    is_url = asked.get("encoding-type") == "url"
    return documents.uploads(call.bucket, found, prefix=prefix, is_url=is_url)


def _complete(service: Service, call: Call) -> Reply:
    bucket = service.buckets.get(call.bucket)
    upload_id = _argument(call, "uploadId")
    listed = documents.read_parts(service.document(call))
    with bucket.lock:
        upload = bucket.upload(upload_id, call.key)
        parts = _chosen(listed, dict(upload.parts))
    etag = service.buckets.joint_tag(parts)
    found = objects.stored(tuple(part.piece for part in parts), etag, upload.headers, {})
    bucket.complete(upload_id, call.key, found, conditions(call.request))
    host = call.request.headers.get("host", "")
    return documents.completed(f"http://{host}{call.request.path}", call.bucket, call.key, etag)


def _chosen(listed: list[tuple[int, str]], there: dict[int, Part]) -> list[Part]:
    """Return the parts that were listed, if they may make an object."""
    numbers = [part_number for part_number, _ in listed]
    if any(first >= second for first, second in itertools.pairwise(numbers)):
        raise S3Error("InvalidPartOrder")
    chosen = []
    for part_number, etag in listed:
        part = there.get(part_number)
        if part is None or part.etag != etag:
            raise S3Error("InvalidPart")
        chosen.append(part)
    if any(len(part.piece) < LEAST_PART_BYTES for part in chosen[:-1]):
        raise S3Error("EntityTooSmall")
    return chosen


def _abort(service: Service, call: Call) -> Reply:
    bucket = service.buckets.get(call.bucket)
    upload_id = _argument(call, "uploadId")
    with bucket.lock:
        bucket.upload(upload_id, call.key)
        del bucket.uploads[upload_id]
    return Reply(204)


def _argument(call: Call, name: str) -> str:
    value = call.request.argument(name)
    if not value:
        raise S3Error("InvalidArgument", f"The query has no {name}.")
    return value


OPERATIONS: Final[dict[tuple[str, frozenset[str]], Operation]] = {
    ("POST", frozenset(("uploads",))): _create,
    ("PUT", frozenset(("uploadId", "partNumber"))): _put_part,
    ("GET", frozenset(("uploadId",))): _list_parts,
    ("POST", frozenset(("uploadId",))): _complete,
    ("DELETE", frozenset(("uploadId",))): _abort,
}
