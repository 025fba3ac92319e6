"""Buckets in memory that keep the rules of S3, and answer as S3 does.

Objects, ranges, conditions, checksums, listings, batches of deletes, multipart uploads; no
copies, versions, access rules or signatures.
"""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Final
from urllib.parse import quote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from tests.s3.faults import REFUSALS, Request, Response, failure, fault_of

MIN_PART_BYTES: Final = 5 << 20
_MODIFIED: Final = 1_795_000_000  # an object's age means nothing
_DIGESTS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "content-md5": lambda body: hashlib.md5(body).digest(),
    "x-amz-checksum-sha1": lambda body: hashlib.sha1(body).digest(),
    "x-amz-checksum-sha256": lambda body: hashlib.sha256(body).digest(),
    "x-amz-checksum-crc32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, or a part of one."""

    data: bytes = field(repr=False)
    etag: str
    checksums: Mapping[str, str]


@dataclass(slots=True)
class Bucket:
    """The objects of a bucket, and its unfinished uploads: key and parts by number, by id."""

    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, Stored]]] = field(default_factory=dict)


#: Operations by method: on the service, a bucket, an object, and an upload of one.
_ON_BUCKET: Final = {
    "GET": "ListObjects",
    "PUT": "CreateBucket",
    "HEAD": "HeadBucket",
    "DELETE": "DeleteBucket",
    "POST": "DeleteObjects",
}
_ON_OBJECT: Final = {
    "GET": "GetObject",
    "PUT": "PutObject",
    "HEAD": "HeadObject",
    "DELETE": "DeleteObject",
    "POST": "CreateMultipartUpload",
}
_ON_UPLOAD: Final = {
    "GET": "ListParts",
    "PUT": "UploadPart",
    "DELETE": "AbortMultipartUpload",
    "POST": "CompleteMultipartUpload",
}
_UNKNOWN: Final = "Unknown"


def operation_of(method: str, *, bucket: str, key: str, query: Mapping[str, str]) -> str:
    """Name the operation of S3 that a request asks for."""
    if not bucket:
        return "ListBuckets" if method == "GET" else _UNKNOWN
    if key:
        return (_ON_UPLOAD if "uploadId" in query else _ON_OBJECT).get(method, _UNKNOWN)
    if method == "GET" and "uploads" in query:
        return "ListMultipartUploads"
    if method == "GET" and "location" in query:
        return "GetBucketLocation"
    return _ON_BUCKET.get(method, _UNKNOWN)


def stored(data: bytes, checksums: Mapping[str, str] | None = None) -> Stored:
    """Make an object of bytes, with the ETag that S3 gives it."""
    return Stored(data, f'"{hashlib.md5(data).hexdigest()}"', checksums or {})


def serve(bucket: Bucket, request: Request, *, fault: str, number: int) -> Response:
    """Do what a request asks of a bucket, and give the answer; *number* is unlike any other."""
    match request.operation:
        case "PutObject" | "UploadPart":
            return _put(bucket, request)
        case "GetObject" | "HeadObject":
            return _get(bucket, request)
        case "DeleteObject":
            bucket.objects.pop(request.key, None)
            return Response(204)
        case "DeleteObjects":
            return _delete_many(bucket, request)
        case "ListObjects":
            return _list(bucket, request)
        case "CreateMultipartUpload":
            bucket.uploads[str(number)] = (request.key, {})
            return _xml("InitiateMultipartUploadResult", _names(request, UploadId=str(number)))
        case "CompleteMultipartUpload":
            return _complete(bucket, request, lose_one=fault == "lostpart")
        case "AbortMultipartUpload":
            found = bucket.uploads.pop(request.query["uploadId"], None)
            return Response(204) if found else failure(request, 404, "NoSuchUpload")
        case "ListParts" | "ListMultipartUploads":
            return _list_uploads(bucket, request)
        case "CreateBucket" | "HeadBucket":
            return Response(200)
        case "DeleteBucket":
            return failure(request, 409, "BucketNotEmpty") if bucket.objects else Response(204)
        case "GetBucketLocation":
            return _xml("LocationConstraint", "")
        case "ListBuckets":
            return _xml("ListAllMyBucketsResult", "<Buckets></Buckets>")
    return failure(request, 501, "NotImplemented")


def _put(bucket: Bucket, request: Request) -> Response:
    if "x-amz-copy-source" in request.headers:
        return failure(request, 501, "NotImplemented")
    if refused := _condition_failed(request, bucket.objects.get(request.key)):
        return refused
    sent = {name: value for name, value in request.headers.items() if name in _DIGESTS}
    if any(b64encode(_DIGESTS[name](request.body)).decode() != sent[name] for name in sent):
        return failure(request, 400, "BadDigest")
    checksums = {
        name: value
        for name, value in request.headers.items()
        if name.startswith("x-amz-checksum-") and name != "x-amz-checksum-algorithm"
    }
    made = stored(request.body, checksums)
    if request.operation == "UploadPart":
        upload = bucket.uploads.get(request.query["uploadId"])
        if upload is None:
            return failure(request, 404, "NoSuchUpload")
        upload[1][int(request.query["partNumber"])] = made
    else:
        bucket.objects[request.key] = made
    return Response(200, {"etag": made.etag, **checksums})


def _condition_failed(request: Request, standing: Stored | None) -> Response | None:
    etag = standing.etag if standing else None
    if (wanted := request.headers.get("if-match")) and wanted not in (etag, "*" if etag else ""):
        return failure(request, 412, "PreconditionFailed")
    if (unwanted := request.headers.get("if-none-match")) and etag and unwanted in (etag, "*"):
        if request.operation in ("GetObject", "HeadObject"):
            return Response(304, {"etag": etag})
        return failure(request, 412, "PreconditionFailed")
    return None


def _get(bucket: Bucket, request: Request) -> Response:
    found = bucket.objects.get(request.key)
    if found is None:
        return failure(request, 404, "NoSuchKey")
    if refused := _condition_failed(request, found):
        return refused
    size = len(found.data)
    headers = {
        "etag": found.etag,
        "last-modified": formatdate(_MODIFIED, usegmt=True),
        "content-type": "application/octet-stream",
        "accept-ranges": "bytes",
    }
    status, body = 200, found.data
    if "range" in request.headers:
        first, end = _span(request.headers["range"], size)
        if first >= min(end, size):
            said = {"content-range": f"bytes */{size}"}
            return failure(request, 416, "InvalidRange", said)
        status, body = 206, found.data[first:end]
        headers["content-range"] = f"bytes {first}-{end - 1}/{size}"
    elif request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
        headers |= found.checksums
    if request.method == "HEAD":
        return Response(status, headers, length=len(body))
    return Response(status, headers, body)


def _span(text: str, size: int) -> tuple[int, int]:
    """Read ``bytes=first-last``, ``bytes=first-`` or ``bytes=-count``; give first and end."""
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size if int(last) else 0
    return int(first), min(int(last) + 1, size) if last else size


def _complete(bucket: Bucket, request: Request, *, lose_one: bool) -> Response:
    upload = bucket.uploads.get(request.query["uploadId"])
    if upload is None:
        return failure(request, 404, "NoSuchUpload")
    if refused := _condition_failed(request, bucket.objects.get(request.key)):
        return refused
    parts = []
    for element in ET.fromstring(request.body).iterfind("{*}Part"):
        part = upload[1].get(int(element.findtext("{*}PartNumber", "0")))
        if part is None or element.findtext("{*}ETag", "").strip('"') != part.etag.strip('"'):
            return failure(request, 400, "InvalidPart")
        parts.append(part)
    if not parts or any(len(part.data) < MIN_PART_BYTES for part in parts[:-1]):
        return failure(request, 400, "EntityTooSmall" if parts else "MalformedXML")
    digests = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
    etag = f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'
    if lose_one and len(parts) > 1:
        del parts[len(parts) // 2]
    bucket.objects[request.key] = Stored(b"".join(part.data for part in parts), etag, {})
    del bucket.uploads[request.query["uploadId"]]
    return _xml("CompleteMultipartUploadResult", _names(request, ETag=etag))


def _delete_many(bucket: Bucket, request: Request) -> Response:
    reported = []
    for element in ET.fromstring(request.body).iterfind("{*}Object"):
        key = element.findtext("{*}Key", "")
        fault = fault_of(replace(request, operation="DeleteObject", key=key))
        if fault in REFUSALS:
            code = REFUSALS[fault][1]
            said = f"<Code>{code}</Code><Message>said to be {code}</Message>"
            reported.append(f"<Error><Key>{escape(key)}</Key>{said}</Error>")
        else:
            bucket.objects.pop(key, None)
            reported.append(f"<Deleted><Key>{escape(key)}</Key></Deleted>")
    return _xml("DeleteResult", "".join(reported))


def _list(bucket: Bucket, request: Request) -> Response:
    query = request.query
    second = query.get("list-type") == "2"
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after" if second else "marker", "")
    limit = min(int(query.get("max-keys", "1000")), 1000)
    entries: dict[str, Stored | None] = {}  # None: a common prefix
    for key in sorted(bucket.objects, key=str.encode):
        if not key.startswith(prefix):
            continue
        rest = key[len(prefix) :]
        head = delimiter and prefix + rest.partition(delimiter)[0] + delimiter
        group = head if delimiter and delimiter in rest else None
        if (group or key).encode() > after.encode():
            entries[group or key] = None if group else bucket.objects[key]
    page = list(entries.items())[:limit]
    code = quote if query.get("encoding-type") == "url" else escape
    reported = [f"<Name>{request.bucket}</Name><Prefix>{code(prefix)}</Prefix>"]
    reported += [f"<MaxKeys>{limit}</MaxKeys><KeyCount>{len(page)}</KeyCount>"]
    reported += ["<EncodingType>url</EncodingType>"] if code is quote else []
    if len(entries) > len(page) > 0:
        tag = "NextContinuationToken" if second else "NextMarker"
        reported += [f"<IsTruncated>true</IsTruncated><{tag}>{code(page[-1][0])}</{tag}>"]
    else:
        reported += ["<IsTruncated>false</IsTruncated>"]
    for name, entry in page:
        if entry is None:
            reported += [f"<CommonPrefixes><Prefix>{code(name)}</Prefix></CommonPrefixes>"]
        else:
            reported += [f"<Contents><Key>{code(name)}</Key>{_facts(entry)}</Contents>"]
    return _xml("ListBucketResult", "".join(reported))


def _list_uploads(bucket: Bucket, request: Request) -> Response:
    if request.operation == "ListMultipartUploads":
        prefix = request.query.get("prefix", "")
        reported = [
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId></Upload>"
            for upload, (key, _) in bucket.uploads.items()
            if key.startswith(prefix)
        ]
        body = (
            f"<Bucket>{request.bucket}</Bucket><IsTruncated>false</IsTruncated>{''.join(reported)}"
        )
        return _xml("ListMultipartUploadsResult", body)
    found = bucket.uploads.get(request.query["uploadId"])
    if found is None:
        return failure(request, 404, "NoSuchUpload")
    reported = [
        f"<Part><PartNumber>{number}</PartNumber>{_facts(part)}</Part>"
        for number, part in sorted(found[1].items())
    ]
    body = f"<IsTruncated>false</IsTruncated>{''.join(reported)}"
    return _xml("ListPartsResult", _names(request) + body)


def _facts(entry: Stored) -> str:
    return (
        f"<LastModified>2026-11-18T12:00:00.000Z</LastModified><ETag>{escape(entry.etag)}</ETag>"
        f"<Size>{len(entry.data)}</Size><StorageClass>STANDARD</StorageClass>"
    )


def _names(request: Request, **more: str) -> str:
    named = {"Bucket": request.bucket, "Key": request.key, **more}
    return "".join(f"<{name}>{escape(value)}</{name}>" for name, value in named.items())


def _xml(root: str, inside: str) -> Response:
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{space}">{inside}</{root}>'
    return Response(200, {"content-type": "application/xml"}, text.encode())
