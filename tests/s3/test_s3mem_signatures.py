"""The in-memory S3 server refuses what is not signed, not fresh or not what was signed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
import zlib
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from .s3mem_process import ACCESS, client_of, code_of, new_bucket, rawcalls, running

EMPTY = hashlib.sha256(b"").hexdigest()
DATA = b"123456789"
#: Of DATA: the check values that catalogues of checksums give, and hashlib's.
CHECKSUMS = {
    "crc32": bytes.fromhex("cbf43926"),
    "crc32c": bytes.fromhex("e3069283"),
    "crc64nvme": bytes.fromhex("ae8b14860a799888"),
    "sha1": hashlib.sha1(DATA).digest(),
    "sha256": hashlib.sha256(DATA).digest(),
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server."""
    with running() as (_, found):
        yield found


@pytest.fixture
def client(url: str) -> Iterator[rawcalls.Client]:
    """One connection to it."""
    found = client_of(url)
    yield found
    found.close()


@pytest.fixture
def bucket(client: rawcalls.Client) -> str:
    """A new bucket."""
    return new_bucket(client)


def b64(digest: bytes) -> str:
    """Return a digest as headers have it."""
    return base64.b64encode(digest).decode()


def test_a_request_without_a_signature_is_refused(client: rawcalls.Client, bucket: str) -> None:
    """An anonymous request is refused."""
    answer = client.exchange(f"GET /{bucket}/key HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    assert code_of(answer) == "403 AccessDenied"


def test_a_wrong_secret_and_a_wrong_name_are_reported_apart(url: str) -> None:
    """A wrong secret is SignatureDoesNotMatch, an unknown access key InvalidAccessKeyId."""
    for wrong, code in (
        (client_of(url, secret="guess"), "403 SignatureDoesNotMatch"),
        (client_of(url, access="nobody"), "403 InvalidAccessKeyId"),
    ):
        assert code_of(wrong.call("GET", "/")) == code
        wrong.close()


@pytest.mark.parametrize(("minutes", "status"), [(-16, 403), (-14, 200), (14, 200), (16, 403)])
def test_an_old_or_early_request_is_refused(url: str, minutes: int, status: int) -> None:
    """A clock may differ by 15 minutes, either way."""
    client = client_of(url, now=time.time() + 60 * minutes)
    answer = client.call("GET", "/")
    client.close()

    assert answer.status == status
    assert (status == 200) or code_of(answer) == "403 RequestTimeTooSkewed"


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b"PUT /", b"GET /"), (b"/key HTTP", b"/other HTTP"), (b"/key HTTP", b"/key?x-id=1 HTTP"),
        (b"x-amz-meta-rank: 7", b"x-amz-meta-rank: 8"), (b"host: ", b"host: x"),
        (b"/us-east-1/", b"/eu-west-1/"),
    ],
)  # fmt: skip
def test_the_signature_covers_all_of_the_head(
    client: rawcalls.Client, bucket: str, was: bytes, becomes: bytes
) -> None:
    """Method, path, query, headers and scope cannot be changed after they were signed."""
    headers = {"x-amz-meta-rank": "7"}
    head = client.signer.head("PUT", f"/{bucket}/key", length=1, headers=headers)
    assert head.count(was) == 1

    assert code_of(client.exchange(head.replace(was, becomes), b"x")) == "403 SignatureDoesNotMatch"
    assert client.exchange(head, b"x").status == 200


def test_an_unsigned_amazon_header_is_refused(client: rawcalls.Client, bucket: str) -> None:
    """An x-amz- header that was added after signing is refused."""
    head = client.signer.head("PUT", f"/{bucket}/key", length=1)
    added = head.replace(b"\r\n\r\n", b"\r\nx-amz-meta-rank: 7\r\n\r\n")

    assert code_of(client.exchange(added, b"x")) == "403 AccessDenied"


@pytest.mark.parametrize(
    "authorization",
    [
        "AWS4-HMAC-SHA256 Credential=x",
        "Basic abc",
        f"AWS4-HMAC-SHA256 Credential={ACCESS}/2026/a/s3/aws4,SignedHeaders=host,Signature=0",
    ],
)
def test_an_authorization_that_is_none_is_refused(
    client: rawcalls.Client, authorization: str
) -> None:
    """An Authorization that cannot be read is a malformed one."""
    head = (
        "GET / HTTP/1.1\r\nhost: x\r\nx-amz-date: 20261121T000000Z\r\n"
        f"authorization: {authorization}"
    )

    assert (
        code_of(client.exchange(f"{head}\r\n\r\n".encode())) == "400 AuthorizationHeaderMalformed"
    )


def test_runs_of_spaces_and_odd_queries_are_signed_as_amazon_does(
    client: rawcalls.Client, bucket: str
) -> None:
    """Header values are signed with single spaces; query names are sorted by name, then value."""
    head = client.signer.head("PUT", f"/{bucket}/key", length=1, headers={"x-amz-meta-a": "b c"})
    answer = client.exchange(head.replace(b"a: b c", b"a:   b   c  "), b"x")
    assert answer.status == 200

    listed = client.call("GET", f"/{bucket}", {"prefix": "k +/%&=", "list-type": "2"})
    assert listed.status == 200


def test_a_hashed_body_must_be_the_one_signed(client: rawcalls.Client, bucket: str) -> None:
    """A body that differs from its signed SHA-256 is refused and not stored."""
    right, wrong = hashlib.sha256(DATA).hexdigest(), hashlib.sha256(b"other").hexdigest()

    answer = client.call("PUT", f"/{bucket}/key", body=DATA, payload=wrong)
    assert code_of(answer) == "400 XAmzContentSHA256Mismatch"
    assert client.head(bucket, "key").status == 404
    assert client.call("PUT", f"/{bucket}/key", body=DATA, payload=right).status == 200
    answer = client.call("PUT", f"/{bucket}/key", body=DATA, payload="neither")
    assert code_of(answer) == "400 InvalidArgument"


@pytest.mark.parametrize("name", CHECKSUMS)
def test_a_checksum_is_verified_and_given_back(
    client: rawcalls.Client, bucket: str, name: str
) -> None:
    """A wrong checksum stores nothing; a right one comes back where it is asked for."""
    header, path = f"x-amz-checksum-{name}", f"/{bucket}/key"
    right, wrong = b64(CHECKSUMS[name]), b64(bytes(len(CHECKSUMS[name])))

    assert code_of(client.call("PUT", path, body=DATA, headers={header: wrong})) == "400 BadDigest"
    assert client.head(bucket, "key").status == 404
    stored = client.call("PUT", path, body=DATA, headers={header: right})
    assert (stored.status, stored.headers[header]) == (200, right)
    for method in ("GET", "HEAD"):
        asked = client.call(method, path, headers={"x-amz-checksum-mode": "ENABLED"})
        assert asked.headers[header] == right
        assert header not in client.call(method, path).headers


def test_a_range_does_not_claim_the_checksum_of_the_whole(
    client: rawcalls.Client, bucket: str
) -> None:
    """A part of an object comes without the whole's checksum."""
    right = {"x-amz-checksum-crc32": b64(CHECKSUMS["crc32"])}
    client.call("PUT", f"/{bucket}/key", body=DATA, headers=right)
    headers = {"range": "bytes=0-3", "x-amz-checksum-mode": "ENABLED"}

    answer = client.call("GET", f"/{bucket}/key", headers=headers)
    assert answer.body == DATA[:4]
    assert "x-amz-checksum-crc32" not in answer.headers


def test_an_md5_is_verified(client: rawcalls.Client, bucket: str) -> None:
    """A wrong Content-MD5 is BadDigest, one that can be none InvalidDigest."""
    path = f"/{bucket}/key"
    right, wrong = b64(hashlib.md5(DATA).digest()), b64(bytes(16))

    assert client.call("PUT", path, body=DATA, headers={"content-md5": right}).status == 200
    answer = client.call("PUT", path, body=DATA, headers={"content-md5": wrong})
    assert code_of(answer) == "400 BadDigest"
    answer = client.call("PUT", path, body=DATA, headers={"content-md5": "AAAA"})
    assert code_of(answer) == "400 InvalidDigest"


def presigned(
    client: rawcalls.Client, path: str, *, age_s: int, expires: str, access: str = ACCESS
) -> rawcalls.Answer:
    """Ask for an object with a signature in the query, made *age_s* seconds ago."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() - age_s))
    key, scope = client.signer.key(stamp[:8])
    fields = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256", "X-Amz-Credential": f"{access}/{scope}",
        "X-Amz-Date": stamp, "X-Amz-Expires": expires, "X-Amz-SignedHeaders": "host",
    }  # fmt: skip
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in fields.items())
    canonical = f"GET\n{path}\n{query}\nhost:h\n\nhost\nUNSIGNED-PAYLOAD"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    target = f"{path}?{query}&X-Amz-Signature={signature}"
    return client.exchange(f"GET {target} HTTP/1.1\r\nhost: h\r\n\r\n".encode())


def test_a_signature_in_the_query_lasts_as_long_as_it_says(
    client: rawcalls.Client, bucket: str
) -> None:
    """A presigned request is served until it expires, not before its time, for a week at most."""
    client.put(bucket, "key", DATA)
    path = f"/{bucket}/key"

    assert presigned(client, path, age_s=50, expires="60").body == DATA
    assert code_of(presigned(client, path, age_s=70, expires="60")) == "403 AccessDenied"
    assert code_of(presigned(client, path, age_s=-960, expires="60")) == "403 AccessDenied"
    malformed = "400 AuthorizationQueryParametersError"
    assert code_of(presigned(client, path, age_s=0, expires="604801")) == malformed
    assert code_of(presigned(client, path, age_s=0, expires="-1")) == malformed
    stranger = presigned(client, path, age_s=0, expires="60", access="nobody")
    assert code_of(stranger) == "403 InvalidAccessKeyId"


def trailed(parts: list[bytes], crc: bytes) -> bytes:
    """Return a body in chunks that are not signed, with a checksum behind it."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return chunks + b"0\r\nx-amz-checksum-crc32:%b\r\n\r\n" % base64.b64encode(crc)


@pytest.mark.parametrize("framed", ["length", "chunked"])
def test_an_unsigned_chunked_body_is_decoded_and_verified(
    client: rawcalls.Client, bucket: str, framed: str
) -> None:
    """aws-chunked is taken off, within HTTP's own chunks too, and the trailer is trusted."""
    parts = [b"a" * 70_000, b"b" * 3, b"c"]
    whole = b"".join(parts)
    right = zlib.crc32(whole).to_bytes(4, "big")
    headers = {
        "content-encoding": "aws-chunked", "x-amz-decoded-content-length": str(len(whole)),
        "x-amz-trailer": "x-amz-checksum-crc32",
    }  # fmt: skip

    def put(crc: bytes) -> rawcalls.Answer:
        body = trailed(parts, crc)
        length: int | None = len(body)
        extra = {}
        if framed == "chunked":
            length, extra = None, {"transfer-encoding": "chunked"}
            halves = (body[:999], body[999:])
            body = (
                b"".join(b"%x;x=y\r\n%b\r\n" % (len(half), half) for half in halves) + b"0\r\n\r\n"
            )
        head = client.signer.head(
            "PUT", f"/{bucket}/key", length=length, headers={**headers, **extra},
            payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        )  # fmt: skip
        return client.exchange(head, body)

    assert code_of(put(bytes(4))) == "400 BadDigest"
    assert client.head(bucket, "key").status == 404
    assert put(right).status == 200
    assert client.get(bucket, "key").body == whole


def signed_body(
    client: rawcalls.Client, bucket: str, parts: list[bytes], trailer: bytes | None
) -> tuple[bytes, bytes]:
    """Return head and body of a write in signed chunks, made after Amazon's description."""
    payload = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD" + ("-TRAILER" if trailer is not None else "")
    headers = {"x-amz-decoded-content-length": str(sum(map(len, parts)))}
    tail = (
        b"" if trailer is None else trailer + b"\r\nx-amz-trailer-signature:" + b"0" * 64 + b"\r\n"
    )
    framing = sum(len(b"%x" % len(part)) + 83 for part in [*parts, b""]) + 2 * len(parts)
    length = framing + sum(map(len, parts)) + len(tail) + 2
    head = client.signer.head(
        "PUT", f"/{bucket}/key", length=length, headers=headers, payload=payload
    )
    previous = client.signer.signature
    stamp = head.decode().partition("x-amz-date: ")[2][:16]
    key, scope = client.signer.key(stamp[:8])

    def sign(kind: str, *digests: str) -> str:
        text = "\n".join((f"AWS4-HMAC-SHA256-{kind}", stamp, scope, previous, *digests))
        return hmac.new(key, text.encode(), "sha256").hexdigest()

    body = b""
    for part in [*parts, b""]:
        previous = sign("PAYLOAD", EMPTY, hashlib.sha256(part).hexdigest())
        body += b"%x;chunk-signature=%b\r\n%b" % (len(part), previous.encode(), part)
        body += b"\r\n" if part else b""
    if trailer is not None:
        signature = sign("TRAILER", hashlib.sha256(trailer + b"\n").hexdigest())
        body += tail.replace(b"0" * 64, signature.encode())
    body += b"\r\n"
    assert len(body) == length
    return head, body


@pytest.mark.parametrize("trailer", [None, b"x-amz-checksum-crc32:yjeCOA=="])
def test_every_chunk_of_a_signed_body_is_checked(
    client: rawcalls.Client, bucket: str, trailer: bytes | None
) -> None:
    """A signed chunk or trailer that was changed is refused; unchanged, the body is stored."""
    parts = [b"a" * 8192, b"b" * 100]
    whole = b"".join(parts)
    if trailer is not None:
        crc = base64.b64encode(zlib.crc32(whole).to_bytes(4, "big"))
        trailer = b"x-amz-checksum-crc32:" + crc
    head, body = signed_body(client, bucket, parts, trailer)
    changed = [body.replace(b"bb\r\n", b"bc\r\n")]
    if trailer is not None:
        changed.append(body.replace(trailer, b"x-amz-checksum-crc32:AAAAAA=="))

    for wrong in changed:
        assert wrong != body
        assert code_of(client.exchange(head, wrong)) == "403 SignatureDoesNotMatch"
    assert client.head(bucket, "key").status == 404
    assert client.exchange(head, body).status == 200
    assert client.get(bucket, "key").body == whole


@pytest.mark.parametrize(
    "body", [b"5\r\nabc", b"zz\r\n", b"3\r\nabcd\r\n0\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n"]
)
def test_a_broken_chunked_body_is_incomplete(
    client: rawcalls.Client, bucket: str, body: bytes
) -> None:
    """Chunks that are cut off, too long or not as many bytes as said are refused."""
    head = client.signer.head(
        "PUT", f"/{bucket}/key", length=len(body), payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        headers={"x-amz-decoded-content-length": "4"},
    )  # fmt: skip

    assert code_of(client.exchange(head, body)) == "400 IncompleteBody"
    assert client.head(bucket, "key").status == 404


@pytest.mark.parametrize(
    "head",
    [
        b"no request", b"GET /", b"GET / HTTP/1.0", b"GET / HTTP/1.1\r\nno header", b"\xff\xfe",
        b"PUT / HTTP/1.1\r\ncontent-length: -1", b"PUT / HTTP/1.1\r\ncontent-length: 1e3",
        b"PUT / HTTP/1.1\r\ncontent-length: " + b"9" * 5000, b"x" * 20_000,
    ],
)  # fmt: skip
def test_what_is_no_request_ends_its_connection_alone(
    client: rawcalls.Client, url: str, head: bytes
) -> None:
    """Bytes that are no HTTP/1.1 close the connection they came on, and no other."""
    stranger = client_of(url)
    with pytest.raises(ConnectionError):
        stranger.exchange(head + b"\r\n\r\n")
    stranger.close()

    assert client.call("GET", "/").status == 200


@pytest.mark.parametrize("target", ["/%ff", "/b?prefix=%ff", "/\xff"])
def test_what_is_no_utf_8_is_refused(client: rawcalls.Client, target: str) -> None:
    """A path or a query that is no UTF-8 is a bad request."""
    head = f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode("latin-1")

    assert client.exchange(head).status == 400


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Algorithm=AWS4-HMAC-SHA256",
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=a/b&X-Amz-Date=%F0%9F%98%80"
        "&X-Amz-Expires=%C2%B2&X-Amz-SignedHeaders=host;%F0%9F%98%80&X-Amz-Signature=%C2%B2",
    ],
)
def test_a_query_that_signs_nothing_is_refused(client: rawcalls.Client, query: str) -> None:
    """A signature in the query that cannot be read is a malformed one."""
    answer = client.exchange(f"GET /?{query} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    assert code_of(answer) == "400 AuthorizationQueryParametersError"
