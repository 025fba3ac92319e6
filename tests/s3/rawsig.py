"""A small S3 client over http.client: how tests look at a bucket without the code under test.

One connection a request, path style, no retries; every request is signed (Signature Version 4).
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from tests.s3.servers import Endpoint

_NOTHING: Mapping[str, str] = {}
_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class RawError(Exception):
    """A server answered what a test did not expect."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    @property
    def code(self) -> str:
        """Return the code of an S3 error, as ``NoSuchKey``; empty if there is none."""
        if b"<Code>" not in self.body:
            return ""
        return self.body.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()

    def texts(self, path: str) -> list[str]:
        """List the texts of the elements at *path* of an XML body, whatever its namespace."""
        root = ET.fromstring(self.body)
        spaced = "/".join(f"{{*}}{name}" for name in path.split("/"))
        return [element.text or "" for element in root.findall(spaced)]

    def expect(self, *statuses: int) -> Reply:
        """Return the reply itself if its status is one of *statuses*."""
        if self.status not in statuses:
            raise RawError(f"{self.status} {self.code}: {self.body[:600]!r}")
        return self


@dataclass(frozen=True, slots=True)
class RawS3:
    """A client of one server; the verbs raise `RawError` for whatever they do not name."""

    endpoint: Endpoint
    timeout_s: float = 30.0

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = _NOTHING,
        headers: Mapping[str, str] = _NOTHING,
        body: bytes = b"",
    ) -> Reply:
        """Send one signed request and give the answer, whatever it is; *path* is not quoted yet."""
        target = quote(path, safe="/-_.~")
        pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query.items())
        text = "&".join(f"{name}={value}" for name, value in pairs)
        signed = sign(self.endpoint, method, target, text, headers, body)
        connection = self._connect()
        try:
            url = f"{target}?{text}" if text else target
            connection.request(method, url, body or None, signed)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, found, answer.read())
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.endpoint.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            ca_file = self.endpoint.ca_file
            context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
            return http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout_s, context=context
            )
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)

    def create_bucket(self, bucket: str) -> None:
        """Make a bucket that is not there yet."""
        region = self.endpoint.region
        body = b""
        if region != "us-east-1":
            body = (
                "<CreateBucketConfiguration><LocationConstraint>"
                f"{region}</LocationConstraint></CreateBucketConfiguration>"
            ).encode()
        self.request("PUT", f"/{bucket}", body=body).expect(200)

    def remove_bucket(self, bucket: str) -> None:
        """Remove a bucket and all that is in it, unfinished uploads too."""
        for key, upload in self.list_uploads(bucket):
            self.abort_upload(bucket, key, upload)
        while keys := self.list_keys(bucket):  # MinIO lists n/x when n has gone
            for key in keys:
                self.delete(bucket, key)
        self.request("DELETE", f"/{bucket}").expect(204)

    def put(
        self, bucket: str, key: str, body: bytes, *, headers: Mapping[str, str] = _NOTHING
    ) -> None:
        """Write an object."""
        self.request("PUT", f"/{bucket}/{key}", headers=headers, body=body).expect(200)

    def get(self, bucket: str, key: str) -> bytes | None:
        """Read an object; None if there is none."""
        reply = self.request("GET", f"/{bucket}/{key}").expect(200, 404)
        if reply.code == "NoSuchBucket":
            raise RawError(f"no bucket {bucket}")
        return reply.body if reply.status == 200 else None

    def get_range(self, bucket: str, key: str, byte_range: str) -> bytes:
        """Read part of an object; *byte_range* as in HTTP, ``bytes=0-9``."""
        headers = {"range": byte_range}
        return self.request("GET", f"/{bucket}/{key}", headers=headers).expect(206).body

    def head(self, bucket: str, key: str) -> Mapping[str, str] | None:
        """Return the headers of an object; None if there is none."""
        reply = self.request("HEAD", f"/{bucket}/{key}").expect(200, 404)
        return reply.headers if reply.status == 200 else None

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object, if it is there."""
        self.request("DELETE", f"/{bucket}/{key}").expect(204)

    def list_keys(self, bucket: str, prefix: str = "") -> list[str]:
        """List all keys that begin with *prefix*, over as many pages as it takes."""
        return [key for page in self.list_pages(bucket, prefix) for key in page]

    def list_pages(
        self, bucket: str, prefix: str = "", *, page_keys: int = 1000
    ) -> list[list[str]]:
        """List the keys that begin with *prefix*, page by page."""
        pages = []
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(page_keys)}
        while True:
            reply = self.request("GET", f"/{bucket}", query=query).expect(200)
            pages.append(reply.texts("Contents/Key"))
            if reply.texts("IsTruncated") != ["true"]:
                return pages
            [query["continuation-token"]] = reply.texts("NextContinuationToken")

    def list_uploads(self, bucket: str, prefix: str = "") -> list[tuple[str, str]]:
        """List key and id of the multipart uploads that were neither completed nor aborted.

        MinIO lists those of one key only, and none where *prefix* is not that key.
        """
        query = {"uploads": "", "prefix": prefix}
        reply = self.request("GET", f"/{bucket}", query=query).expect(200)
        return list(zip(reply.texts("Upload/Key"), reply.texts("Upload/UploadId"), strict=True))

    def start_upload(self, bucket: str, key: str) -> str:
        """Begin a multipart upload and give its id."""
        reply = self.request("POST", f"/{bucket}/{key}", query={"uploads": ""}).expect(200)
        [upload] = reply.texts("UploadId")
        return upload

    def upload_part(self, bucket: str, key: str, upload: str, *, number: int, body: bytes) -> str:
        """Send one part, counted from 1, and give its ETag."""
        query = {"partNumber": str(number), "uploadId": upload}
        reply = self.request("PUT", f"/{bucket}/{key}", query=query, body=body).expect(200)
        return reply.headers["etag"]

    def complete_upload(self, bucket: str, key: str, upload: str, etags: Sequence[str]) -> Reply:
        """Join the parts from 1 on, and give the answer, whatever it is."""
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in enumerate(etags, 1)
        )
        space = _NAMESPACE.strip("{}")
        body = f'<CompleteMultipartUpload xmlns="{space}">{parts}</CompleteMultipartUpload>'
        query = {"uploadId": upload}
        return self.request("POST", f"/{bucket}/{key}", query=query, body=body.encode())

    def abort_upload(self, bucket: str, key: str, upload: str) -> None:
        """Forget a multipart upload and its parts."""
        query = {"uploadId": upload}
        self.request("DELETE", f"/{bucket}/{key}", query=query).expect(204)


def sign(
    endpoint: Endpoint,
    method: str,
    target: str,
    query: str,
    headers: Mapping[str, str],
    body: bytes,
) -> dict[str, str]:
    """Return *headers* and what Signature Version 4 adds; *target*, *query* as they are sent."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    day = now[:8]
    digest = hashlib.sha256(body).hexdigest()
    host = urlsplit(endpoint.url).netloc
    added = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    signed = {name.lower(): value.strip() for name, value in headers.items()} | added
    names = ";".join(sorted(signed))
    lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    canonical = "\n".join((method, target, query, lines, names, digest))
    scope = f"{day}/{endpoint.region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = b"AWS4" + endpoint.secret_key.encode()
    for step in (day, endpoint.region, "s3", "aws4_request"):
        key = hmac.digest(key, step.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={endpoint.access_key}/{scope}"
    authorization = f"{credential}, SignedHeaders={names}, Signature={signature}"
    return signed | {"authorization": f"AWS4-HMAC-SHA256 {authorization}"}
