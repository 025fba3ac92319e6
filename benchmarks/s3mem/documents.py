"""The XML that S3 speaks: what it answers, and what it is sent."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from urllib.parse import quote
from xml.etree import ElementTree as ET

from benchmarks.s3mem.errors import S3Error
from benchmarks.s3mem.objects import Bucket, Page, Part, Upload
from benchmarks.s3mem.wire import Reply, is_number

_DECLARATION: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NAMESPACE: Final = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_OWNER: Final = "<ID>s3mem</ID><DisplayName>s3mem</DisplayName>"
#: What text may not hold as it is: markup, and what XML 1.0 has no character for.
_SPECIAL: Final = re.compile('[&<>"\x00-\x1f\x7f\ufffe\uffff]')
_NAMED: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_MOST_DELETES: Final = 1000


def reply(document: str, status: int = 200) -> Reply:
    """Return a response that holds a document."""
    body = (_DECLARATION + document).encode()
    return Reply(status, "Content-Type: application/xml\r\n", (body,), len(body))


def refusal(error: S3Error, resource: str) -> Reply:
    """Return the response for a refused request."""
    fields = "".join(f"<{name}>{text(value)}</{name}>" for name, value in error.fields.items())
    answer = reply(
        f"<Error><Code>{error.code}</Code><Message>{text(error.detail)}</Message>"
        f"<Resource>{text(resource)}</Resource><RequestId>0</RequestId>{fields}"
        "</Error>",
        error.status,
    )
    answer.headers += error.headers
    return answer


def text(value: str) -> str:
    """Escape text; control characters become references, as S3 writes them."""
    return _SPECIAL.sub(_reference, value)


def _reference(found: re.Match[str]) -> str:
    return _NAMED.get(found[0]) or f"&#x{ord(found[0]):X};"


def _name(value: str, *, is_url: bool) -> str:
    return quote(value, safe="/") if is_url else text(value)


def moment(seconds: float) -> str:
    """Return a time as S3's documents write it."""
    return f"{_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=256)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def buckets(found: Iterable[Bucket]) -> Reply:
    """Answer ListBuckets."""
    rows = "".join(
        f"<Bucket><Name>{bucket.name}</Name><CreationDate>{moment(bucket.created)}</CreationDate>"
        "</Bucket>"
        for bucket in found
    )
    return reply(
        f"<ListAllMyBucketsResult {_NAMESPACE}><Owner>{_OWNER}</Owner><Buckets>{rows}</Buckets>"
        "</ListAllMyBucketsResult>"
    )


def location() -> Reply:
    """Answer GetBucketLocation: nowhere, which is us-east-1."""
    return reply(f"<LocationConstraint {_NAMESPACE}/>")


def token(name: str) -> str:
    """Make a continuation token of the last name of a page."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def name_of_token(value: str) -> str:
    """Return the name in a continuation token."""
    try:
        return base64.b64decode(value, altchars=b"-_", validate=True).decode()
    except ValueError:
        raise S3Error("InvalidArgument", "The continuation token is not one of ours.") from None


def listing(bucket: str, page: Page, asked: dict[str, str], *, most: int) -> Reply:
    """Answer ListObjects or ListObjectsV2, whichever was *asked*."""
    is_url = asked.get("encoding-type") == "url"
    second = asked.get("list-type") == "2"
    head = [f"<Name>{bucket}</Name><MaxKeys>{most}</MaxKeys>"]
    head.append(f"<IsTruncated>{str(page.is_truncated).lower()}</IsTruncated>")
    head.append(f"<Prefix>{_name(asked.get('prefix', ''), is_url=is_url)}</Prefix>")
    if is_url:
        head.append("<EncodingType>url</EncodingType>")
    for argument, element in (("delimiter", "Delimiter"), ("start-after", "StartAfter")):
        if argument in asked:
            head.append(f"<{element}>{_name(asked[argument], is_url=is_url)}</{element}>")
    if second:
        head.append(f"<KeyCount>{len(page.objects) + len(page.prefixes)}</KeyCount>")
        if "continuation-token" in asked:
            head.append(
                f"<ContinuationToken>{text(asked['continuation-token'])}</ContinuationToken>"
            )
        if page.is_truncated:
            head.append(f"<NextContinuationToken>{token(page.last)}</NextContinuationToken>")
    else:
        head.append(f"<Marker>{_name(asked.get('marker', ''), is_url=is_url)}</Marker>")
        if page.is_truncated:
            head.append(f"<NextMarker>{_name(page.last, is_url=is_url)}</NextMarker>")
    rows = [
        f"<Contents><Key>{_name(key, is_url=is_url)}</Key>"
        f"<LastModified>{moment(found.modified)}</LastModified>"
        f"<ETag>&quot;{found.etag}&quot;</ETag><Size>{found.nbytes}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for key, found in page.objects
    ]
    rows += [
        f"<CommonPrefixes><Prefix>{_name(prefix, is_url=is_url)}</Prefix></CommonPrefixes>"
        for prefix in page.prefixes
    ]
    return reply(f"<ListBucketResult {_NAMESPACE}>{''.join(head + rows)}</ListBucketResult>")


def initiated(bucket: str, key: str, upload_id: str) -> Reply:
    """Answer CreateMultipartUpload."""
    return reply(
        f"<InitiateMultipartUploadResult {_NAMESPACE}><Bucket>{bucket}</Bucket>"
        f"<Key>{text(key)}</Key><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
    )


def completed(location: str, bucket: str, key: str, etag: str) -> Reply:
    """Answer CompleteMultipartUpload."""
    return reply(
        f"<CompleteMultipartUploadResult {_NAMESPACE}><Location>{text(location)}</Location>"
        f"<Bucket>{bucket}</Bucket><Key>{text(key)}</Key><ETag>&quot;{etag}&quot;</ETag>"
        "</CompleteMultipartUploadResult>"
    )


def parts(
    bucket: str, key: str, upload_id: str, found: list[tuple[int, Part]], *, most: int, after: int
) -> Reply:
    """Answer ListParts with those that follow *after*."""
    following = [(number, part) for number, part in found if number > after]
    shown = following[:most]
    rows = "".join(
        f"<Part><PartNumber>{number}</PartNumber>"
        f"<LastModified>{moment(part.modified)}</LastModified>"
        f"<ETag>&quot;{part.etag}&quot;</ETag><Size>{len(part.piece)}</Size></Part>"
        for number, part in shown
    )
    return reply(
        f"<ListPartsResult {_NAMESPACE}><Bucket>{bucket}</Bucket><Key>{text(key)}</Key>"
        f"<UploadId>{upload_id}</UploadId><Initiator>{_OWNER}</Initiator><Owner>{_OWNER}</Owner>"
        f"<StorageClass>STANDARD</StorageClass><PartNumberMarker>{after}</PartNumberMarker>"
        f"<NextPartNumberMarker>{shown[-1][0] if shown else after}</NextPartNumberMarker>"
        f"<MaxParts>{most}</MaxParts>"
        f"<IsTruncated>{str(len(following) > len(shown)).lower()}</IsTruncated>{rows}"
        "</ListPartsResult>"
    )


def uploads(bucket: str, found: list[tuple[str, Upload]], *, prefix: str, is_url: bool) -> Reply:
    """Answer ListMultipartUploads, always whole."""
    rows = "".join(
        f"<Upload><Key>{_name(upload.key, is_url=is_url)}</Key><UploadId>{upload_id}</UploadId>"
        f"<Initiator>{_OWNER}</Initiator><Owner>{_OWNER}</Owner>"
        f"<StorageClass>STANDARD</StorageClass><Initiated>{moment(upload.started)}</Initiated>"
        "</Upload>"
        for upload_id, upload in found
    )
    encoding = "<EncodingType>url</EncodingType>" if is_url else ""
    return reply(
        f"<ListMultipartUploadsResult {_NAMESPACE}><Bucket>{bucket}</Bucket><KeyMarker/>"
        f"<UploadIdMarker/><Prefix>{_name(prefix, is_url=is_url)}</Prefix>{encoding}"
        f"<MaxUploads>{max(1000, len(found))}</MaxUploads><IsTruncated>false</IsTruncated>{rows}"
        "</ListMultipartUploadsResult>"
    )


def deleted(keys: Iterable[str], refused: Iterable[tuple[str, S3Error]]) -> Reply:
    """Answer DeleteObjects."""
    rows = "".join(f"<Deleted><Key>{text(key)}</Key></Deleted>" for key in keys)
    rows += "".join(
        f"<Error><Key>{text(key)}</Key><Code>{error.code}</Code>"
        f"<Message>{text(error.detail)}</Message></Error>"
        for key, error in refused
    )
    return reply(f"<DeleteResult {_NAMESPACE}>{rows}</DeleteResult>")


def read_deletes(body: bytes) -> tuple[list[str], bool]:
    """Return the keys of a DeleteObjects, and whether only refusals shall be answered."""
    root = _read(body, "Delete")
    keys = [_child(item, "Key") for item in root.iterfind("{*}Object")]
    if not 0 < len(keys) <= _MOST_DELETES:
        raise S3Error("MalformedXML")
    return keys, root.findtext("{*}Quiet", "false").strip() == "true"


def read_parts(body: bytes) -> list[tuple[int, str]]:
    """Return the numbers and entity tags of a CompleteMultipartUpload."""
    root = _read(body, "CompleteMultipartUpload")
    found = []
    for item in root.iterfind("{*}Part"):
        number = _child(item, "PartNumber").strip()
        if not is_number(number):
            raise S3Error("MalformedXML")
        found.append((int(number), _child(item, "ETag").strip().strip('"')))
    if not found:
        raise S3Error("MalformedXML")
    return found


def _read(body: bytes, name: str) -> ET.Element:
    try:
        root = ET.fromstring(body)
    except ET.ParseError:
        raise S3Error("MalformedXML") from None
    if root.tag.rpartition("}")[2] != name:
        raise S3Error("MalformedXML")
    return root


def _child(item: ET.Element, name: str) -> str:
    value = item.findtext(f"{{*}}{name}")
    if value is None:
        raise S3Error("MalformedXML")
    return value
