"""The server that misbehaves: it serves ordinary keys well, and each word does what it says."""

from __future__ import annotations

import threading
import zlib
from base64 import b64decode
from collections.abc import Iterator

import pytest

from tests.s3.faults import WORDS
from tests.s3.faulty import FaultyServer
from tests.s3.rawsig import RawS3
from tests.s3.servers import Endpoint

# A fake is held to what the real servers are held to, but for what it does not do: it knows
# every bucket and checks no signatures.
from tests.s3.test_servers import (  # noqa: F401
    PART,
    test_a_key_may_continue_another,
    test_a_key_may_end_in_a_slash,
    test_a_key_that_continues_another_is_listed,
    test_abort_forgets_parts,
    test_conditional_put_has_one_winner,
    test_conditional_put_keeps,
    test_delete_removes,
    test_delimiter_gives_common_prefixes,
    test_get_gives_what_put_took,
    test_keys_are_not_paths,
    test_listing_comes_in_pages,
    test_multipart_joins_parts,
    test_nothing_has_no_range,
    test_put_replaces,
    test_ranges,
    test_small_parts_are_refused,
    test_wrong_checksums_are_refused,
)
from tests.s3.wire import ask, connect, parse, receive, request, wait_for_request

BODY = bytes(range(200)) * 5


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[Endpoint]:
    """Let what is imported above look at a server of this kind."""
    with FaultyServer() as server:
        yield server.endpoint


@pytest.fixture(scope="module")
def raw_s3(s3_endpoint: Endpoint) -> RawS3:
    return RawS3(s3_endpoint)


REFUSED = [
    ("e500", 500, b"InternalError"),
    ("e503", 503, b"SlowDown"),
    ("e403", 403, b"AccessDenied"),
    ("expired", 400, b"ExpiredToken"),
    ("badsig", 403, b"SignatureDoesNotMatch"),
    ("e412", 412, b"PreconditionFailed"),
    ("e416", 416, b"InvalidRange"),
    ("no-bucket", 404, b"NoSuchBucket"),
    ("redirect", 301, b"PermanentRedirect"),
]


@pytest.mark.parametrize(("word", "status", "code"), REFUSED)
@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "DELETE"])
def test_refusals(faulty: FaultyServer, word: str, status: int, code: bytes, method: str) -> None:
    """A word for an error refuses every request for the key with it, and does nothing."""
    faulty.put("b", f"x/{word}-1", BODY)
    for _ in range(3):
        answer = ask(faulty, method, f"/b/x/{word}-1", body=b"new" if method == "PUT" else b"")
        assert (answer.status, answer.end) == (status, "whole")
        assert (b"<Code>%b</Code>" % code in answer.body) == (method != "HEAD")

    assert faulty.get("b", f"x/{word}-1") == BODY
    assert [seen.status for seen in faulty.requests] == [status] * 3


def test_slowdown_says_when_to_come_again(faulty: FaultyServer) -> None:
    """A 503 carries Retry-After, a redirect the region."""
    assert ask(faulty, "GET", "/b/e503").headers["retry-after"] == "1"
    assert ask(faulty, "GET", "/b/redirect").headers["x-amz-bucket-region"] == "eu-central-1"


@pytest.mark.parametrize(("word", "status"), [("e500once", 500), ("e503once", 503)])
def test_once_is_once_an_operation(faulty: FaultyServer, word: str, status: int) -> None:
    """A word ending in once refuses the first request of each operation on a key, then none."""
    key = f"/b/{word}"
    puts = [ask(faulty, "PUT", key, body=BODY).status for _ in range(3)]
    gets = [ask(faulty, "GET", key).status for _ in range(3)]

    assert puts == [status, 200, 200]
    assert gets == [status, 200, 200]
    assert ask(faulty, "GET", key).body == BODY
    assert ask(faulty, "PUT", f"{key}-other").status == status


@pytest.mark.parametrize(("word", "sent"), [("hang", -1), ("hangbody", 0), ("stall", 500)])
def test_hanging_ends_when_released(faulty: FaultyServer, word: str, sent: int) -> None:
    """What hangs sends nothing more until it is released, and then the connection ends."""
    faulty.put("b", word, BODY)
    with connect(faulty) as connection:
        connection.sendall(request("GET", f"/b/{word}", {}, b""))
        wait_for_request(faulty)
        answer = receive(connection, silent_after=sent)
        faulty.release()
        after = receive(connection)

    assert answer.end == "silent"
    assert answer.status == (None if word == "hang" else 200)
    assert answer.body == BODY[: max(sent, 0)]
    assert answer.headers.get("content-length", "1000") == "1000"
    assert (after.status, after.end) == (None, "eof")


def test_hanging_is_released_again_and_again(faulty: FaultyServer) -> None:
    """A request after a release hangs as the first did; a hanging PUT stores nothing."""
    faulty.release()
    with connect(faulty) as connection:
        connection.sendall(request("PUT", "/b/hang", {}, BODY))
        wait_for_request(faulty)
        answer = receive(connection, silent_after=-1)

    assert (answer.status, answer.end) == (None, "silent")
    assert faulty.get("b", "hang") is None
    assert [seen.status for seen in faulty.requests] == [None]


def test_closing_releases_all(faulty: FaultyServer) -> None:
    """The end of the server ends what hangs and what idles, and no thread stays."""
    before = set(threading.enumerate())
    with FaultyServer() as server, connect(server) as hanging, connect(server) as idle:
        hanging.sendall(request("GET", "/b/hang", {}, b""))
        wait_for_request(server)
        idle.sendall(request("GET", "/b/k", {}, b""))
        assert receive(hanging, silent_after=-1).end == "silent"
        assert receive(idle).end == "whole"
        server.close()

        assert receive(hanging).end == "eof"
        assert receive(idle).end == "eof"
    assert not set(threading.enumerate()) - before
    assert ask(faulty, "GET", "/b/k").status == 404


def test_slowdrip_always_goes_on(faulty: FaultyServer) -> None:
    """A dripping body comes byte by byte, until it is released and ends before its end."""
    faulty.put("b", "slowdrip", BODY)
    with connect(faulty) as connection:
        connection.sendall(request("GET", "/b/slowdrip", {}, b""))
        received = b""
        while piece := connection.recv(1 << 20):
            received += piece
            if BODY[:3] in received:
                faulty.release()

    body = parse(received, "eof").body
    assert body == BODY[: len(body)]
    assert 3 <= len(body) < len(BODY)


def test_reset_breaks_before_an_answer(faulty: FaultyServer) -> None:
    """A reset is RST instead of an answer, whatever the method; nothing is done."""
    for method in ("PUT", "GET", "HEAD", "DELETE"):
        answer = ask(faulty, method, "/b/reset", body=BODY if method == "PUT" else b"")
        assert (answer.status, answer.end) == (None, "reset")

    assert faulty.get("b", "reset") is None


@pytest.mark.parametrize(("word", "end"), [("resetmid", "reset"), ("trunc", "eof")])
def test_the_connection_breaks_in_the_body(faulty: FaultyServer, word: str, end: str) -> None:
    """The length promises all, half of it comes, and the connection ends."""
    faulty.put("b", word, BODY)
    answer = ask(faulty, "GET", f"/b/{word}")

    assert (answer.status, answer.end) == (200, end)
    assert answer.headers["content-length"] == "1000"
    assert answer.body == BODY[:500]
    assert ask(faulty, "HEAD", f"/b/{word}").end == "whole"


def test_badcrc_tells_of_the_original(faulty: FaultyServer) -> None:
    """One bit is flipped and the checksum is the original's, so that a client can notice."""
    faulty.put("b", "badcrc", BODY)
    answer = ask(faulty, "GET", "/b/badcrc")
    crc32 = int.from_bytes(b64decode(answer.headers["x-amz-checksum-crc32"]), "big")

    assert crc32 == zlib.crc32(BODY) != zlib.crc32(answer.body)
    assert bits(answer.body, BODY) == 1


def test_flip_tells_nothing(faulty: FaultyServer) -> None:
    """One bit is flipped, the length is right, and no checksum shows it; a range is flipped too."""
    faulty.put("b", "flip", BODY)
    answer = ask(faulty, "GET", "/b/flip", headers={"x-amz-checksum-mode": "ENABLED"})
    part = ask(faulty, "GET", "/b/flip", headers={"range": "bytes=10-19"})

    assert (answer.status, answer.end) == (200, "whole")
    assert not [name for name in answer.headers if name.startswith("x-amz-checksum")]
    assert bits(answer.body, BODY) == 1
    assert bits(part.body, BODY[10:20]) == 1
    assert faulty.get("b", "flip") == BODY


def bits(one: bytes, other: bytes) -> int:
    """Count the bits in which two of one length differ."""
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_shortlen_is_a_whole_answer_with_too_little(faulty: FaultyServer) -> None:
    """Half of the body comes, and the length says that this is all."""
    faulty.put("b", "shortlen", BODY)
    answer = ask(faulty, "GET", "/b/shortlen")

    assert (answer.status, answer.end) == (200, "whole")
    assert answer.headers["content-length"] == "500"
    assert answer.body == BODY[:500]


def test_wrongrange_gives_all(faulty: FaultyServer) -> None:
    """A range is answered with 200 and the whole object."""
    faulty.put("b", "wrongrange", BODY)
    answer = ask(faulty, "GET", "/b/wrongrange", headers={"range": "bytes=10-19"})

    assert (answer.status, answer.body) == (200, BODY)
    assert [seen.range for seen in faulty.requests] == ["bytes=10-19"]


@pytest.mark.parametrize(("count", "left"), [(1, [0]), (2, [0]), (3, [0, 2])])
def test_lostpart_loses_one_and_says_nothing(
    faulty: FaultyServer, count: int, left: list[int]
) -> None:
    """A complete upload of several parts lacks one; answer and ETag are as if it did not."""
    raw = RawS3(faulty.endpoint)
    bodies = [PART[number:] + PART[:number] for number in range(count)]
    etags = {}
    for key in ("lostpart", "good"):
        upload = raw.start_upload("b", key)
        parts = [
            raw.upload_part("b", key, upload, number=number, body=body)
            for number, body in enumerate(bodies, 1)
        ]
        etags[key] = raw.complete_upload("b", key, upload, parts).expect(200).texts("ETag")

    assert faulty.get("b", "lostpart") == b"".join(bodies[number] for number in left)
    assert etags["lostpart"] == etags["good"]


def test_completeerror_is_an_error_in_a_success(faulty: FaultyServer) -> None:
    """The end of an upload is 200 with an error inside, and no object."""
    raw = RawS3(faulty.endpoint)
    upload = raw.start_upload("b", "completeerror")
    etag = raw.upload_part("b", "completeerror", upload, number=1, body=BODY)
    reply = raw.complete_upload("b", "completeerror", upload, [etag])

    assert (reply.status, reply.code) == (200, "InternalError")
    assert faulty.get("b", "completeerror") is None
    assert faulty.uploads("b") == ["completeerror"]


def test_ignored_conditions_replace(faulty: FaultyServer) -> None:
    """A PUT with If-None-Match: * is 200 and replaces what is there."""
    faulty.put("b", "ignores-conditions", b"old")
    answer = ask(
        faulty, "PUT", "/b/ignores-conditions", headers={"if-none-match": "*"}, body=b"new"
    )

    assert answer.status == 200
    assert faulty.get("b", "ignores-conditions") == b"new"


def test_lieput_stores_nothing(faulty: FaultyServer) -> None:
    """A PUT and the end of an upload are 200 with an ETag, and nothing is stored."""
    raw = RawS3(faulty.endpoint)
    answer = ask(faulty, "PUT", "/b/lieput", body=BODY)
    upload = raw.start_upload("b", "lieput")
    etag = raw.upload_part("b", "lieput", upload, number=1, body=BODY)

    assert answer.status == 200
    assert answer.headers["etag"]
    assert raw.complete_upload("b", "lieput", upload, [etag]).expect(200).code == ""
    assert faulty.get("b", "lieput") is None


def test_a_listing_fails_by_prefix_or_bucket(faulty: FaultyServer) -> None:
    """A word in the prefix or in the name of the bucket makes a listing fail."""
    assert ask(faulty, "GET", "/b?list-type=2&prefix=e500/").status == 500
    assert ask(faulty, "GET", "/my-e503?list-type=2").status == 503
    assert ask(faulty, "GET", "/no-bucket?list-type=2").status == 404
    assert ask(faulty, "HEAD", "/no-bucket").status == 404
    assert ask(faulty, "PUT", "/redirect/k").status == 301
    assert ask(faulty, "GET", "/b?list-type=2&prefix=trunc").end == "eof"
    assert ask(faulty, "GET", "/b?list-type=2&prefix=good").end == "whole"


def test_a_word_may_fail_one_operation(faulty: FaultyServer) -> None:
    """A word after the name of an operation fails that one alone."""
    assert ask(faulty, "PUT", "/b/get-e500", body=BODY).status == 200
    assert ask(faulty, "GET", "/b/get-e500").status == 500
    assert ask(faulty, "HEAD", "/b/get-e500").status == 200
    raw = RawS3(faulty.endpoint)
    upload = raw.start_upload("b", "part-e503once")
    query = {"uploadId": upload, "partNumber": "1"}
    tries = [raw.request("PUT", "/b/part-e503once", query=query).status for _ in range(2)]
    assert tries == [503, 200]


@pytest.mark.parametrize("word", sorted(WORDS))
def test_a_word_within_a_word_is_none(faulty: FaultyServer, word: str) -> None:
    """Keys that merely contain the letters of a word are served well."""
    for key in (f"x{word}", f"{word}x", f"a/1{word}2/b"):
        assert ask(faulty, "PUT", f"/b/{key}", body=BODY).status == 200
        assert ask(faulty, "GET", f"/b/{key}").body == BODY


def test_a_batch_of_deletes_fails_by_key(faulty: FaultyServer) -> None:
    """Of the keys in one DeleteObjects those with a word fail and stay; the others go."""
    for key in ("a", "e403", "c"):
        faulty.put("b", key, BODY)
    body = b"<Delete><Object><Key>a</Key></Object><Object><Key>e403</Key></Object></Delete>"
    answer = ask(faulty, "POST", "/b?delete", body=body)

    said = b"<Code>AccessDenied</Code><Message>said to be AccessDenied</Message>"
    assert b"<Error><Key>e403</Key>" + said + b"</Error>" in answer.body
    assert b"<Deleted><Key>a</Key></Deleted>" in answer.body
    assert RawS3(faulty.endpoint).list_keys("b") == ["c", "e403"]


def test_requests_are_counted(faulty: FaultyServer) -> None:
    """Every request is seen with method, operation, key, status and range, before its answer."""
    ask(faulty, "PUT", "/b/x/k%20%2B", body=BODY)
    ask(faulty, "GET", "/b/x/k%20%2B", headers={"range": "bytes=0-1"})
    ask(faulty, "GET", "/b?list-type=2")

    seen = [(r.method, r.operation, r.bucket, r.key, r.status, r.range) for r in faulty.requests]
    assert seen == [
        ("PUT", "PutObject", "b", "x/k +", 200, None),
        ("GET", "GetObject", "b", "x/k +", 206, "bytes=0-1"),
        ("GET", "ListObjects", "b", "", 200, None),
    ]
    assert faulty.count("x/k +") == 2
    assert faulty.count("x/k +", "GetObject") == 1


def test_connections_are_kept(faulty: FaultyServer) -> None:
    """Many requests go over one connection, until one asks for its end."""
    with connect(faulty) as connection:
        for _ in range(3):
            head = {"expect": "100-continue", "content-length": str(len(BODY))}
            connection.sendall(request("PUT", "/b/k", head, b""))
            assert receive(connection).status == 100
            connection.sendall(BODY)
            assert receive(connection).status == 200
        connection.sendall(request("GET", "/b/k", {"connection": "close"}, b""))
        assert receive(connection).body == BODY
        assert receive(connection).end == "eof"


@pytest.mark.parametrize("outer", ["chunks of HTTP", ""])
def test_chunked_bodies_are_decoded(faulty: FaultyServer, outer: str) -> None:
    """A body in chunks of AWS, with a trailer, in chunks of HTTP or not, is stored decoded."""
    crc32 = "y/Q5Jg=="
    body = b"3;chunk-signature=0\r\n123\r\n6;x\r\n456789\r\n0\r\nx-amz-checksum-crc32:%b\r\n\r\n"
    body %= crc32.encode()
    headers = {"x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}
    if outer:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        headers["transfer-encoding"] = "chunked"
    stored = ask(faulty, "PUT", "/b/k", headers=headers, body=body)

    assert stored.status == 200
    assert faulty.get("b", "k") == b"123456789"
    reported = ask(faulty, "GET", "/b/k", headers={"x-amz-checksum-mode": "ENABLED"})
    assert reported.headers["x-amz-checksum-crc32"] == crc32
