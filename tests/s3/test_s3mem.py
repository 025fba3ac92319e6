"""The in-memory S3 server stores, lists and refuses as S3 does: seen by a raw client."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from .s3mem_process import (
    ACCESS,
    DIRECTORY,
    SECRET,
    client_of,
    code_of,
    elements,
    new_bucket,
    rawcalls,
    running,
)

KEYS = (
    "plain", "a b", "a+b", "ünï/ç", "k~(1)!*'", "p%41", "x//y", "/leading", "dir/", "a/../b",
    "q?x=1&y#z", "<&>\"", "tab\there", "😀",
)  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that makes MD5s."""
    with running("--etag", "md5") as (_, found):
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


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 322_957, 9 << 20])
def test_an_object_comes_back_as_it_was_put(
    client: rawcalls.Client, bucket: str, nbytes: int
) -> None:
    """An object comes back byte for byte, with its length, and its MD5 as the entity tag."""
    data = os.urandom(nbytes)

    assert client.put(bucket, "key", data).status == 200

    answer = client.get(bucket, "key")
    assert answer.body == data
    assert answer.headers["etag"] == f'"{hashlib.md5(data).hexdigest()}"'
    head = client.head(bucket, "key")
    assert (head.status, head.headers["content-length"], head.body) == (200, str(nbytes), b"")


@pytest.mark.parametrize("key", KEYS)
def test_every_character_of_a_key_is_kept(client: rawcalls.Client, bucket: str, key: str) -> None:
    """A key is what was sent, neither cleaned up nor joined with another, and is listed so."""
    assert client.put(bucket, key, key.encode()).status == 200

    assert client.get(bucket, key).body == key.encode()
    listed = client.call("GET", f"/{bucket}", {"list-type": "2", "encoding-type": "url"})
    assert elements(listed.body, "Key") == [quote(key, safe="/")]
    assert client.call("DELETE", f"/{bucket}/{key}").status == 204
    assert code_of(client.get(bucket, key)) == "404 NoSuchKey"


def test_a_key_may_have_1024_bytes_and_no_more(client: rawcalls.Client, bucket: str) -> None:
    """The longest key is stored; one more byte is refused."""
    assert client.put(bucket, "é" * 512, b"x").status == 200

    assert code_of(client.put(bucket, "é" * 512 + "x", b"x")) == "400 KeyTooLongError"


def test_headers_of_an_object_come_back(client: rawcalls.Client, bucket: str) -> None:
    """Content type and user metadata are kept, aws-chunked is not."""
    headers = {
        "content-type": "image/jpeg", "x-amz-meta-rank": "7",
        "content-encoding": "aws-chunked,gzip",
    }  # fmt: skip
    client.call("PUT", f"/{bucket}/key", body=b"x", headers=headers)

    found = client.head(bucket, "key").headers
    assert (found["content-type"], found["x-amz-meta-rank"]) == ("image/jpeg", "7")
    assert found["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("asked", "expected", "extent"),
    [
        ("bytes=0-0", b"0", "0-0"), ("bytes=2-4", b"234", "2-4"), ("bytes=7-", b"789", "7-9"),
        ("bytes=8-99", b"89", "8-9"), ("bytes=-3", b"789", "7-9"),
        ("bytes=-99", b"0123456789", "0-9"),
    ],
)  # fmt: skip
def test_a_range_is_what_was_asked_for(
    client: rawcalls.Client, bucket: str, asked: str, expected: bytes, extent: str
) -> None:
    """A range is cut at the end of the object and says what it is."""
    client.put(bucket, "key", b"0123456789")

    answer = client.call("GET", f"/{bucket}/key", headers={"range": asked})
    assert (answer.status, answer.body) == (206, expected)
    assert answer.headers["content-range"] == f"bytes {extent}/10"


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=99-100", "bytes=-0"])
def test_a_range_without_a_byte_is_refused(
    client: rawcalls.Client, bucket: str, asked: str
) -> None:
    """A range behind the end is 416, with the size of the object."""
    client.put(bucket, "key", b"0123456789")

    answer = client.call("GET", f"/{bucket}/key", headers={"range": asked})
    assert code_of(answer) == "416 InvalidRange"
    assert answer.headers["content-range"] == "bytes */10"


@pytest.mark.parametrize("asked", ["bytes=5-2", "items=0-1", "bytes=a-b", "bytes=-"])
def test_what_is_no_range_is_ignored(client: rawcalls.Client, bucket: str, asked: str) -> None:
    """A Range header that names no range reads the whole object."""
    client.put(bucket, "key", b"0123456789")

    answer = client.call("GET", f"/{bucket}/key", headers={"range": asked})
    assert (answer.status, answer.body) == (200, b"0123456789")


def test_a_range_of_an_empty_object_is_refused_with_its_size(
    client: rawcalls.Client, bucket: str
) -> None:
    """Any range of an empty object is 416 and names the size 0; its first part is there."""
    client.put(bucket, "key", b"")

    answer = client.get_range(bucket, "key", 0, 8 << 20)
    assert code_of(answer) == "416 InvalidRange"
    assert elements(answer.body, "ActualObjectSize") == ["0"]
    first = client.call("GET", f"/{bucket}/key", {"partNumber": "1"})
    assert (first.status, first.body) == (200, b"")


def test_a_head_of_nothing_has_no_body(client: rawcalls.Client, bucket: str) -> None:
    """HEAD of a missing key is 404 and a head alone: the next response is not shifted."""
    client.put(bucket, "key", b"data")

    assert client.head(bucket, "missing").status == 404
    assert client.head("no-such-bucket", "key").status == 404
    assert client.get(bucket, "key").body == b"data"


def test_what_is_missing_is_named(client: rawcalls.Client, bucket: str) -> None:
    """A missing key, bucket and upload have a code each; deleting a missing key is no error."""
    assert code_of(client.get(bucket, "missing")) == "404 NoSuchKey"
    assert code_of(client.get("no-such-bucket", "key")) == "404 NoSuchBucket"
    assert code_of(client.put("no-such-bucket", "key", b"x")) == "404 NoSuchBucket"
    assert code_of(client.list("no-such-bucket")) == "404 NoSuchBucket"
    query = {"uploadId": "none", "partNumber": "1"}
    answer = client.call("PUT", f"/{bucket}/key", query, body=b"x")
    assert code_of(answer) == "404 NoSuchUpload"
    assert client.call("DELETE", f"/{bucket}/missing").status == 204


def test_a_bucket_is_made_once_and_deleted_empty(client: rawcalls.Client, bucket: str) -> None:
    """A bucket is made once, is listed, and is deleted only when it is empty."""
    assert code_of(client.call("PUT", f"/{bucket}", body=b"")) == "409 BucketAlreadyOwnedByYou"
    assert code_of(client.call("PUT", "/No_Bucket", body=b"")) == "400 InvalidBucketName"
    assert bucket in elements(client.call("GET", "/").body, "Name")
    assert client.call("HEAD", f"/{bucket}").status == 200

    client.put(bucket, "key", b"x")
    assert code_of(client.call("DELETE", f"/{bucket}")) == "409 BucketNotEmpty"
    client.call("DELETE", f"/{bucket}/key")
    assert client.call("DELETE", f"/{bucket}").status == 204
    assert client.call("HEAD", f"/{bucket}").status == 404


def test_only_one_of_many_creators_wins(url: str, bucket: str) -> None:
    """If-None-Match: * lets one of eight racing writers in, and all readers see its bytes."""
    statuses: list[int] = []
    barrier = threading.Barrier(8)

    def create(data: bytes) -> None:
        own = client_of(url)
        headers = {"if-none-match": "*"}
        barrier.wait()
        statuses.append(own.call("PUT", f"/{bucket}/key", body=data, headers=headers).status)
        own.close()

    threads = [threading.Thread(target=create, args=(os.urandom(1 << 20),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(statuses) == [200] + [412] * 7


def test_conditions_on_the_entity_tag_hold(client: rawcalls.Client, bucket: str) -> None:
    """If-Match and If-None-Match are obeyed by reads, writes and deletes."""
    etag = client.put(bucket, "key", b"old").headers["etag"]
    path = f"/{bucket}/key"

    refused = "412 PreconditionFailed"
    assert code_of(client.call("PUT", path, body=b"x", headers={"if-none-match": "*"})) == refused
    assert code_of(client.call("PUT", path, body=b"x", headers={"if-match": '"0"'})) == refused
    assert code_of(client.call("GET", path, headers={"if-match": '"0"'})) == refused
    assert code_of(client.call("DELETE", path, headers={"if-match": '"0"'})) == refused
    assert client.call("GET", path, headers={"if-none-match": etag}).status == 304
    assert client.call("GET", path, headers={"if-match": etag}).body == b"old"
    assert client.call("PUT", path, body=b"new", headers={"if-match": etag}).status == 200
    absent = client.call("PUT", f"{path}2", body=b"x", headers={"if-match": etag})
    assert code_of(absent) == "404 NoSuchKey"


def test_many_keys_are_deleted_at_once(client: rawcalls.Client, bucket: str) -> None:
    """DeleteObjects deletes what is there, answers for what is not, and names neither if quiet."""
    client.put(bucket, "a&b", b"x")
    client.put(bucket, "kept", b"x")
    objects = "<Object><Key>a&amp;b</Key></Object><Object><Key>none</Key></Object>"

    answer = client.call(
        "POST", f"/{bucket}", {"delete": ""}, body=f"<Delete>{objects}</Delete>".encode()
    )
    assert elements(answer.body, "Key") == ["a&amp;b", "none"]
    assert elements(client.list(bucket).body, "Key") == ["kept"]
    quiet = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
    answer = client.call("POST", f"/{bucket}", {"delete": ""}, body=quiet)
    assert elements(answer.body, "Key") == []


@pytest.mark.parametrize("body", [b"", b"<Delete>", b"<Other/>", b"<Delete></Delete>"])
def test_a_document_that_is_none_is_refused(
    client: rawcalls.Client, bucket: str, body: bytes
) -> None:
    """What is not well formed, or not the document expected, is MalformedXML."""
    answer = client.call("POST", f"/{bucket}", {"delete": ""}, body=body)

    assert code_of(answer) == "400 MalformedXML"


def test_what_is_not_served_says_so(client: rawcalls.Client, bucket: str) -> None:
    """A subresource, a copy and a method that are not there are refused, not taken for others."""
    copy = {"x-amz-copy-source": "/a/b"}
    assert code_of(client.call("GET", f"/{bucket}/key", {"tagging": ""})) == "501 NotImplemented"
    assert (
        code_of(client.call("PUT", f"/{bucket}", {"policy": ""}, body=b"")) == "501 NotImplemented"
    )
    answer = client.call("PUT", f"/{bucket}/key", body=b"", headers=copy)
    assert code_of(answer) == "501 NotImplemented"
    assert code_of(client.call("PATCH", f"/{bucket}/key")) == "405 MethodNotAllowed"


def test_a_refused_body_does_not_spoil_the_connection(client: rawcalls.Client, bucket: str) -> None:
    """The body of a refused write is read over, and the next request is answered."""
    refused = client.put("no-such-bucket", "key", os.urandom(3 << 20))

    assert code_of(refused) == "404 NoSuchBucket"
    assert client.put(bucket, "key", b"x").status == 200


def test_an_expected_go_ahead_is_given_only_to_what_is_wanted(
    url: str, client: rawcalls.Client, bucket: str
) -> None:
    """100 Continue comes before the body of a write; a refusal comes instead of it."""
    expect = {"expect": "100-continue"}
    host, port = url.removeprefix("http://").split(":")
    good = client.signer.head("PUT", f"/{bucket}/key", length=4, headers=expect)
    bad = client.signer.head("PUT", "/no-such-bucket/key", length=4, headers=expect)
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(good)
        assert sock.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"data")
        assert sock.recv(1024).startswith(b"HTTP/1.1 200 ")

        sock.sendall(bad)
        with sock.makefile("rb") as answer:
            refusal = answer.read()  # to its end: the server closes
    assert refusal.startswith(b"HTTP/1.1 404 ")
    assert client.get(bucket, "key").body == b"data"


@pytest.mark.parametrize("headers", [{}, {"range": "bytes=1-"}])
def test_a_reader_keeps_the_version_it_began_with(
    url: str, client: rawcalls.Client, bucket: str, headers: dict[str, str]
) -> None:
    """A read that goes on while its object is overwritten gets the old bytes, all of them."""
    nbytes = 7 << 20
    old = os.urandom(nbytes)
    client.put(bucket, "key", old)
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        reader.sendall(client.signer.head("GET", f"/{bucket}/key", headers=headers))
        assert reader.recv(11, socket.MSG_WAITALL) == b"HTTP/1.1 20"
        for fill in (b"1", b"2", b"3"):
            client.put(bucket, "key", fill * nbytes)
        with reader.makefile("rb") as answer:
            while answer.readline() != b"\r\n":
                pass
            found = answer.read(nbytes - len(headers))

    assert found == old[len(headers) :]


def test_a_bucket_may_be_named_by_the_host() -> None:
    """With --domain, BUCKET.DOMAIN is the bucket; paths go on to work."""
    with running("--domain", "s3.test") as (_, url):
        client = client_of(url)
        bucket = new_bucket(client)
        host = {"host": f"{bucket}.s3.test:80"}
        assert client.call("PUT", "/a/b", body=b"data", headers=host).status == 200

        assert client.get(bucket, "a/b").body == b"data"
        listed = client.call("GET", "/", {"list-type": "2"}, headers=host)
        assert elements(listed.body, "Key") == ["a/b"]
        client.close()


def test_dropped_bodies_are_zeros_of_the_same_size() -> None:
    """With --drop-bodies sizes are kept, reads return zeros, and digests are still verified."""
    with running("--drop-bodies") as (_, url):
        client = client_of(url)
        bucket = new_bucket(client)
        client.put(bucket, "key", b"data" * 1000)
        wrong = client.call("PUT", f"/{bucket}/key", body=b"x", payload="0" * 64)

        assert client.get(bucket, "key").body == bytes(4000)
        assert code_of(wrong) == "400 XAmzContentSHA256Mismatch"
        client.close()


def test_cheap_tags_differ_and_are_no_md5() -> None:
    """Cheap entity tags differ from write to write and cannot be taken for an MD5."""
    with running() as (_, url):
        client = client_of(url)
        bucket = new_bucket(client)
        tags = {client.put(bucket, "key", b"same").headers["etag"] for _ in range(3)}

        assert len(tags) == 3
        assert all("-" in tag for tag in tags)
        client.close()


def test_the_server_leaves_on_sigterm() -> None:
    """SIGTERM ends the server with status 0, its connections too."""
    with running() as (process, url):
        client = client_of(url)
        client.call("GET", "/")
        process.send_signal(signal.SIGTERM)

        assert process.wait(30) == 0
        with pytest.raises(ConnectionError):
            client.call("GET", "/")
        client.close()


def test_the_server_leaves_when_its_stdin_closes() -> None:
    """With --until-stdin-closes a server does not outlive who started it."""
    with running() as (process, url):
        assert process.stdin is not None
        assert url.startswith("http://127.0.0.1:")
        process.stdin.close()

        assert process.wait(30) == 0


def test_the_raw_client_measures_every_verb(url: str, bucket: str, client: rawcalls.Client) -> None:
    """The raw client's command prints a row for each verb and count of threads."""
    command = [
        sys.executable, str(DIRECTORY / "rawclient.py"), url, "--access", ACCESS,
        "--secret", SECRET, "--bucket", bucket, "--verbs", "PUT,GET,RANGE,HEAD,LIST",
        "--threads", "1,2", "--count", "5", "--bytes", "1000", "--sign", "call",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    rows = [line.split(" | ")[:2] for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 10
    assert len(elements(client.list(bucket).body, "Key")) == 5
