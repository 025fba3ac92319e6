"""The in-memory S3 server lists its keys as S3 does, and makes objects of parts as S3 does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import pytest

from .s3mem_process import client_of, code_of, elements, new_bucket, rawcalls, running

MiB = 1 << 20
KEYS = sorted(
    ("a", "a/", "a/b", "a/c/d", "a/c/e", "a0", "b/x", "b/y/z", "c", "é", "zz/z", "zz/zz"),
    key=str.encode,
)


@pytest.fixture(scope="module")
def client() -> Iterator[rawcalls.Client]:
    """One connection to a server that makes MD5s."""
    with running("--etag", "md5") as (_, url):
        found = client_of(url)
        yield found
        found.close()


@pytest.fixture
def bucket(client: rawcalls.Client) -> str:
    """A new bucket."""
    return new_bucket(client)


@pytest.fixture(scope="module")
def filled(client: rawcalls.Client) -> str:
    """A bucket with KEYS, put in no order."""
    name = new_bucket(client)
    for key in KEYS[::-2] + KEYS[::2] if len(KEYS) % 2 else KEYS[::-1]:
        client.put(name, key, key.encode())
    return name


def rolled_up(prefix: str, delimiter: str, after: str) -> list[str]:
    """Return what a listing shows, in order, made from KEYS in the plainest way."""
    shown: list[str] = []
    for key in KEYS:
        if key.startswith(prefix):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + 1]
            if name > after and key > after and name not in shown:
                shown.append(name)
    return shown


def pages(
    client: rawcalls.Client, bucket: str, query: dict[str, str], *, version: int
) -> list[list[str]]:
    """Return the names on all pages, keys and prefixes of a page in one order."""
    asked = {**query, "list-type": "2"} if version == 2 else dict(query)
    found = []
    while True:
        answer = client.call("GET", f"/{bucket}", asked)
        assert answer.status == 200
        rest = answer.body.partition(b"</Prefix>")[2]
        names = elements(rest, "Key") + elements(rest, "Prefix")
        found.append(sorted(names, key=str.encode))
        tokens = elements(answer.body, "NextContinuationToken" if version == 2 else "NextMarker")
        assert elements(answer.body, "IsTruncated") == [str(bool(tokens)).lower()]
        if version == 2:
            assert elements(answer.body, "KeyCount") == [str(len(names))]
        if not tokens:
            return found
        asked["continuation-token" if version == 2 else "marker"] = tokens[0]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("most", [1, 2, 3, 1000])
@pytest.mark.parametrize("delimiter", ["", "/"])
@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/c/", "none", "zz"])
def test_a_listing_is_every_name_once_in_order(
    client: rawcalls.Client, filled: str, prefix: str, delimiter: str, most: int, version: int
) -> None:
    """Pages of any size join to the keys and common prefixes, in the order of their UTF-8."""
    query = {"prefix": prefix, "max-keys": str(most)} | ({"delimiter": "/"} if delimiter else {})

    found = pages(client, filled, query, version=version)
    assert [name for page in found for name in page] == rolled_up(prefix, delimiter, "")
    assert all(len(page) <= most for page in found)


@pytest.mark.parametrize("delimiter", ["", "/"])
@pytest.mark.parametrize("after", ["a", "a/c/d", "b/", "c", "zzz"])
def test_a_listing_starts_after_a_name(
    client: rawcalls.Client, filled: str, after: str, delimiter: str
) -> None:
    """start-after and marker leave out what is not behind them."""
    query = {"delimiter": "/"} if delimiter else {}

    second = pages(client, filled, {**query, "start-after": after}, version=2)
    first = pages(client, filled, {**query, "marker": after}, version=1)
    assert second == first
    assert all(name > after or name == "a/" for name in second[0])
    if not delimiter:
        assert second[0] == [key for key in KEYS if key > after]


def test_an_object_is_listed_with_size_and_tag(client: rawcalls.Client, bucket: str) -> None:
    """A row of a listing has the size and the entity tag of its object."""
    client.put(bucket, "key", b"12345")

    body = client.list(bucket).body
    assert elements(body, "Size") == ["5"]
    assert elements(body, "ETag") == [f"&quot;{hashlib.md5(b'12345').hexdigest()}&quot;"]


def test_no_keys_asked_for_are_none(client: rawcalls.Client, filled: str) -> None:
    """max-keys 0 lists nothing and is not truncated."""
    body = client.call("GET", f"/{filled}", {"list-type": "2", "max-keys": "0"}).body

    assert (elements(body, "Key"), elements(body, "IsTruncated")) == ([], ["false"])


@pytest.mark.parametrize(
    "query", [{"max-keys": "x"}, {"max-keys": "-1"}, {"list-type": "2", "continuation-token": "?"}]
)
def test_a_bad_argument_of_a_listing_is_refused(
    client: rawcalls.Client, filled: str, query: dict[str, str]
) -> None:
    """A number that is none, and a token that is not ours, are InvalidArgument."""
    assert code_of(client.call("GET", f"/{filled}", query)) == "400 InvalidArgument"


def test_names_are_encoded_where_asked(client: rawcalls.Client, bucket: str) -> None:
    """encoding-type=url encodes keys, prefixes and delimiters; without it they are XML."""
    client.put(bucket, "a&b c/d\x01", b"x")
    query = {"list-type": "2", "delimiter": "/", "encoding-type": "url"}

    body = client.call("GET", f"/{bucket}", query).body
    assert elements(body, "Prefix") == ["", "a%26b%20c/"]
    assert elements(client.list(bucket).body, "Key") == ["a&amp;b c/d&#x1;"]


def start(client: rawcalls.Client, bucket: str, headers: dict[str, str] | None = None) -> str:
    """Start an upload of ``key``."""
    answer = client.call("POST", f"/{bucket}/key", {"uploads": ""}, headers=headers)
    return elements(answer.body, "UploadId")[0]


def send(
    client: rawcalls.Client, bucket: str, upload: str, number: int, data: bytes
) -> tuple[int, str]:
    """Upload a part; its number and entity tag."""
    query = {"uploadId": upload, "partNumber": str(number)}
    answer = client.call("PUT", f"/{bucket}/key", query, body=data)
    assert answer.status == 200
    return number, answer.headers["etag"]


def complete(
    client: rawcalls.Client,
    bucket: str,
    upload: str,
    parts: list[tuple[int, str]],
    headers: dict[str, str] | None = None,
) -> rawcalls.Answer:
    """Complete an upload."""
    rows = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{e}</ETag></Part>" for n, e in parts)
    body = (
        '<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"{rows}</CompleteMultipartUpload>"
    ).encode()
    query = {"uploadId": upload}
    return client.call("POST", f"/{bucket}/key", query, body=body, headers=headers)


def test_parts_make_one_object(client: rawcalls.Client, bucket: str) -> None:
    """Parts sent in any order are one object, read whole, in ranges over a seam, and by number."""
    first, second, third = os.urandom(5 * MiB), os.urandom(5 * MiB + 1), b"the end"
    upload = start(client, bucket, {"content-type": "image/jpeg"})
    send(client, bucket, upload, 7, b"sent again below")
    sent = [
        send(client, bucket, upload, number, data)
        for number, data in ((9, third), (2, first), (7, second))
    ]
    assert client.head(bucket, "key").status == 404

    assert complete(client, bucket, upload, sorted(sent)).status == 200
    whole = first + second + third
    answer = client.get(bucket, "key")
    assert answer.body == whole
    assert answer.headers["content-type"] == "image/jpeg"
    digests = b"".join(hashlib.md5(data).digest() for data in (first, second, third))
    assert answer.headers["etag"] == f'"{hashlib.md5(digests).hexdigest()}-3"'
    seam = client.get_range(bucket, "key", 5 * MiB - 3, 5 * MiB + 6)
    assert seam.body == whole[5 * MiB - 3 :][: 5 * MiB + 6]
    part = client.call("GET", f"/{bucket}/key", {"partNumber": "3"})
    assert (part.status, part.body) == (206, third)
    none = client.call("GET", f"/{bucket}/key", {"partNumber": "4"})
    assert code_of(none) == "416 InvalidPartNumber"
    assert code_of(complete(client, bucket, upload, sent[:1])) == "404 NoSuchUpload"


def test_a_list_of_parts_that_does_not_fit_is_refused(client: rawcalls.Client, bucket: str) -> None:
    """Parts out of order, missing, of another tag, none and too small are distinguished."""
    upload = start(client, bucket)
    one = send(client, bucket, upload, 1, b"small")
    two = send(client, bucket, upload, 2, b"small too")

    for parts, code in (
        ([two, one], "InvalidPartOrder"),
        ([one, one], "InvalidPartOrder"),
        ([one, (3, two[1])], "InvalidPart"),
        ([(1, two[1])], "InvalidPart"),
        ([], "MalformedXML"),
        ([one, two], "EntityTooSmall"),
    ):
        assert code_of(complete(client, bucket, upload, parts)) == f"400 {code}"
    assert complete(client, bucket, upload, [two]).status == 200
    assert client.get(bucket, "key").body == b"small too"


def test_an_upload_obeys_conditions(client: rawcalls.Client, bucket: str) -> None:
    """If-None-Match: * refuses to complete over an object, and the upload goes on."""
    upload = start(client, bucket)
    part = send(client, bucket, upload, 1, b"new")
    client.put(bucket, "key", b"old")
    headers = {"if-none-match": "*"}

    refused = complete(client, bucket, upload, [part], headers)
    assert code_of(refused) == "412 PreconditionFailed"
    assert client.get(bucket, "key").body == b"old"
    assert complete(client, bucket, upload, [part]).status == 200


def test_uploads_and_their_parts_are_listed(client: rawcalls.Client, bucket: str) -> None:
    """What goes on is listed, parts by pages, until it is aborted."""
    upload = start(client, bucket)
    for number in (3, 1, 2):
        send(client, bucket, upload, number, b"x" * number)
    path = f"/{bucket}/key"

    assert elements(client.call("GET", f"/{bucket}", {"uploads": ""}).body, "UploadId") == [upload]
    page = client.call("GET", path, {"uploadId": upload, "max-parts": "2"}).body
    assert elements(page, "PartNumber") == ["1", "2"]
    assert elements(page, "IsTruncated") == ["true"]
    rest = client.call("GET", path, {"uploadId": upload, "part-number-marker": "2"}).body
    assert (elements(rest, "PartNumber"), elements(rest, "Size")) == (["3"], ["3"])
    assert client.call("DELETE", path, {"uploadId": upload}).status == 204
    assert elements(client.call("GET", f"/{bucket}", {"uploads": ""}).body, "UploadId") == []
    assert code_of(client.call("GET", path, {"uploadId": upload})) == "404 NoSuchUpload"


@pytest.mark.parametrize("number", ["0", "10001", "x", "-1"])
def test_a_part_has_a_number_from_1_to_10000(
    client: rawcalls.Client, bucket: str, number: str
) -> None:
    """Any other number is refused."""
    query = {"uploadId": start(client, bucket), "partNumber": number}

    answer = client.call("PUT", f"/{bucket}/key", query, body=b"x")
    assert code_of(answer) == "400 InvalidArgument"
