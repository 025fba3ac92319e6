"""The servers for tests: each serves what S3 promises, seen by a client that is not kvio's."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import ssl
from base64 import b64encode
from pathlib import Path
from threading import Barrier, Thread

import pytest

from tests.s3.faulty import FaultyServer
from tests.s3.rawsig import RawError, RawS3
from tests.s3.servers import Endpoint

PART = random.Random(4).randbytes(5 << 20)


@pytest.mark.parametrize("nbytes", [0, 1, 65_537, (8 << 20) + 3])
def test_get_gives_what_put_took(raw_s3: RawS3, s3_bucket: str, nbytes: int) -> None:
    """An object of any size comes back byte for byte, and HEAD knows its size."""
    body = random.Random(nbytes).randbytes(nbytes)
    raw_s3.put(s3_bucket, "a/b~c.d-e_f=g@h+i", body)

    assert raw_s3.get(s3_bucket, "a/b~c.d-e_f=g@h+i") == body
    facts = raw_s3.head(s3_bucket, "a/b~c.d-e_f=g@h+i")
    assert facts is not None
    assert facts["content-length"] == str(nbytes)
    assert raw_s3.list_keys(s3_bucket) == ["a/b~c.d-e_f=g@h+i"]


def test_absence_is_reported(raw_s3: RawS3, s3_bucket: str) -> None:
    """A missing key is 404 NoSuchKey, a missing bucket 404 NoSuchBucket."""
    assert raw_s3.get(s3_bucket, "missing") is None
    assert raw_s3.head(s3_bucket, "missing") is None
    assert raw_s3.request("GET", f"/{s3_bucket}/missing").code == "NoSuchKey"
    assert raw_s3.request("GET", f"/{s3_bucket}-not/missing").code == "NoSuchBucket"


def test_put_replaces(raw_s3: RawS3, s3_bucket: str) -> None:
    """The later of two objects under a key stays."""
    raw_s3.put(s3_bucket, "k", b"first")
    raw_s3.put(s3_bucket, "k", b"second, longer")

    assert raw_s3.get(s3_bucket, "k") == b"second, longer"


def test_ranges(raw_s3: RawS3, s3_bucket: str) -> None:
    """A range from the front, the middle and the end is that range; beyond the end is 416."""
    body = bytes(range(256))
    raw_s3.put(s3_bucket, "k", body)

    assert raw_s3.get_range(s3_bucket, "k", "bytes=0-9") == body[:10]
    assert raw_s3.get_range(s3_bucket, "k", "bytes=100-") == body[100:]
    assert raw_s3.get_range(s3_bucket, "k", "bytes=-64") == body[-64:]
    assert raw_s3.get_range(s3_bucket, "k", "bytes=250-999") == body[250:]
    beyond = raw_s3.request("GET", f"/{s3_bucket}/k", headers={"range": "bytes=256-300"})
    assert (beyond.status, beyond.code) == (416, "InvalidRange")


def test_nothing_has_no_range(raw_s3: RawS3, s3_bucket: str) -> None:
    """Any range of an empty object is 416, as it is on S3."""
    raw_s3.put(s3_bucket, "k", b"")

    assert raw_s3.request("GET", f"/{s3_bucket}/k", headers={"range": "bytes=0-9"}).status == 416


def test_listing_comes_in_pages(raw_s3: RawS3, s3_bucket: str) -> None:
    """Listing gives every key below a prefix once, sorted, at most a page at a time."""
    keys = [f"p/{number:03d}" for number in range(25)]
    for key in ["o/0", *keys, "q"]:
        raw_s3.put(s3_bucket, key, b"")

    pages = raw_s3.list_pages(s3_bucket, "p/", page_keys=10)
    assert [len(page) for page in pages] == [10, 10, 5]
    assert [key for page in pages for key in page] == keys


def test_delimiter_gives_common_prefixes(raw_s3: RawS3, s3_bucket: str) -> None:
    """Keys with the delimiter after the prefix are listed as what they have in common."""
    for key in ("a/1", "a/2", "b", "c/1"):
        raw_s3.put(s3_bucket, key, b"x")

    reply = raw_s3.request("GET", f"/{s3_bucket}", query={"list-type": "2", "delimiter": "/"})
    assert reply.texts("CommonPrefixes/Prefix") == ["a/", "c/"]
    assert reply.texts("Contents/Key") == ["b"]


def test_delete_removes(raw_s3: RawS3, s3_bucket: str) -> None:
    """A deleted object is gone, and deleting it again is no error."""
    raw_s3.put(s3_bucket, "k", b"x")
    raw_s3.delete(s3_bucket, "k")
    raw_s3.delete(s3_bucket, "k")

    assert raw_s3.get(s3_bucket, "k") is None


def test_multipart_joins_parts(raw_s3: RawS3, s3_bucket: str) -> None:
    """Parts make one object when the upload is complete, and nothing before."""
    upload = raw_s3.start_upload(s3_bucket, "k")
    bodies = [PART, PART[::-1], b"the rest"]
    etags = [
        raw_s3.upload_part(s3_bucket, "k", upload, number=number, body=body)
        for number, body in enumerate(bodies, 1)
    ]
    assert raw_s3.get(s3_bucket, "k") is None
    assert raw_s3.list_uploads(s3_bucket, "k") == [("k", upload)]
    done = raw_s3.complete_upload(s3_bucket, "k", upload, etags)

    assert (done.status, done.code) == (200, "")
    assert raw_s3.get(s3_bucket, "k") == b"".join(bodies)
    assert raw_s3.list_uploads(s3_bucket, "k") == []


@pytest.mark.s3_property("small-parts")
def test_small_parts_are_refused(raw_s3: RawS3, s3_bucket: str) -> None:
    """A part below 5 MiB that is not the last makes no object."""
    upload = raw_s3.start_upload(s3_bucket, "k")
    etags = [
        raw_s3.upload_part(s3_bucket, "k", upload, number=number, body=b"small")
        for number in (1, 2)
    ]

    assert raw_s3.complete_upload(s3_bucket, "k", upload, etags).code == "EntityTooSmall"
    assert raw_s3.get(s3_bucket, "k") is None


@pytest.mark.s3_property("aborted-upload")
def test_abort_forgets_parts(raw_s3: RawS3, s3_bucket: str) -> None:
    """An aborted upload leaves no object, no upload, and can no longer be completed."""
    upload = raw_s3.start_upload(s3_bucket, "k")
    etag = raw_s3.upload_part(s3_bucket, "k", upload, number=1, body=b"part")
    raw_s3.abort_upload(s3_bucket, "k", upload)

    assert raw_s3.list_uploads(s3_bucket, "k") == []
    assert raw_s3.complete_upload(s3_bucket, "k", upload, [etag]).code == "NoSuchUpload"


@pytest.mark.s3_property("conditions")
def test_conditional_put_keeps(raw_s3: RawS3, s3_bucket: str) -> None:
    """A PUT with If-None-Match: * is 412 where the key is taken, and changes nothing."""
    condition = {"if-none-match": "*"}
    raw_s3.put(s3_bucket, "k", b"first", headers=condition)
    second = raw_s3.request("PUT", f"/{s3_bucket}/k", headers=condition, body=b"second")

    assert (second.status, second.code) == (412, "PreconditionFailed")
    assert raw_s3.get(s3_bucket, "k") == b"first"


@pytest.mark.s3_property("conditions")
def test_conditional_put_has_one_winner(raw_s3: RawS3, s3_bucket: str) -> None:
    """Of eight conditional PUTs at once one succeeds, and its bytes stay."""
    barrier = Barrier(8)
    statuses: dict[int, int] = {}

    def race(number: int) -> None:
        barrier.wait(20)
        reply = raw_s3.request(
            "PUT",
            f"/{s3_bucket}/k",
            headers={"if-none-match": "*"},
            body=b"%d" % number * 100_000,
        )
        statuses[number] = reply.status

    racers = [Thread(target=race, args=(number,)) for number in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    [winner] = [number for number, status in statuses.items() if status == 200]
    assert set(statuses.values()) <= {200, 409, 412}
    assert raw_s3.get(s3_bucket, "k") == b"%d" % winner * 100_000


@pytest.mark.s3_property("signature")
@pytest.mark.s3_property("signature-code")
def test_bad_signatures_are_refused(raw_s3: RawS3, s3_bucket: str) -> None:
    """A request signed with a wrong secret, or with an unknown key, is 403 and stores nothing."""
    endpoint = raw_s3.endpoint
    wrong = RawS3(dataclasses.replace(endpoint, secret_key="not" + endpoint.secret_key))
    unknown = RawS3(dataclasses.replace(endpoint, access_key="nobody"))

    refused = wrong.request("PUT", f"/{s3_bucket}/k", body=b"x")
    assert (refused.status, refused.code) == (403, "SignatureDoesNotMatch")
    refused = unknown.request("PUT", f"/{s3_bucket}/k", body=b"x")
    assert (refused.status, refused.code) == (403, "InvalidAccessKeyId")
    assert raw_s3.get(s3_bucket, "k") is None


@pytest.mark.s3_property("checksum")
@pytest.mark.parametrize("header", ["content-md5", "x-amz-checksum-sha256"])
def test_wrong_checksums_are_refused(raw_s3: RawS3, s3_bucket: str, header: str) -> None:
    """A body that is not what its checksum says is 400 and is not stored."""
    kind = hashlib.md5 if header == "content-md5" else hashlib.sha256
    wrong = b64encode(kind(b"another body").digest()).decode()
    refused = raw_s3.request("PUT", f"/{s3_bucket}/k", headers={header: wrong}, body=b"body")

    assert refused.status == 400
    assert raw_s3.get(s3_bucket, "k") is None


@pytest.mark.s3_property("nested-keys")
def test_a_key_may_continue_another(raw_s3: RawS3, s3_bucket: str) -> None:
    """An object n and an object n/x live side by side."""
    raw_s3.put(s3_bucket, "n", b"1")
    raw_s3.put(s3_bucket, "n/x", b"2")

    assert (raw_s3.get(s3_bucket, "n"), raw_s3.get(s3_bucket, "n/x")) == (b"1", b"2")


@pytest.mark.s3_property("nested-listing")
def test_a_key_that_continues_another_is_listed(raw_s3: RawS3, s3_bucket: str) -> None:
    """Listing gives an object n, an object n/x, and n/x below the prefix n/."""
    raw_s3.put(s3_bucket, "n", b"1")
    raw_s3.put(s3_bucket, "n/x", b"2")

    assert raw_s3.list_keys(s3_bucket) == ["n", "n/x"]
    assert raw_s3.list_keys(s3_bucket, "n/") == ["n/x"]


@pytest.mark.s3_property("unclean-keys")
@pytest.mark.parametrize("key", ["x//y", "a/../b"])
def test_keys_are_not_paths(raw_s3: RawS3, s3_bucket: str, key: str) -> None:
    """A key with an empty or dotted segment is a key like any other."""
    raw_s3.put(s3_bucket, key, b"x")

    assert raw_s3.list_keys(s3_bucket) == [key]
    assert raw_s3.get(s3_bucket, key) == b"x"


@pytest.mark.s3_property("slash-at-end")
def test_a_key_may_end_in_a_slash(raw_s3: RawS3, s3_bucket: str) -> None:
    """A key with / at its end has a body like any other."""
    raw_s3.put(s3_bucket, "folder/", b"x")

    assert raw_s3.get(s3_bucket, "folder/") == b"x"


def test_remove_bucket_removes_all(raw_s3: RawS3, s3_bucket: str) -> None:
    """A bucket goes with its objects and unfinished uploads."""
    bucket = f"{s3_bucket}-2"
    raw_s3.create_bucket(bucket)
    for key in ("a/b", "n", "m/x"):
        raw_s3.put(bucket, key, b"x")
    raw_s3.start_upload(bucket, "u")
    raw_s3.remove_bucket(bucket)

    assert raw_s3.request("HEAD", f"/{bucket}").status == 404


def test_tls_serves_those_who_know_its_authority(tls_endpoint: Endpoint, tls_bucket: str) -> None:
    """An https server serves a client that trusts its CA."""
    raw = RawS3(tls_endpoint)
    raw.put(tls_bucket, "k", b"x")

    assert tls_endpoint.url.startswith("https://")
    assert raw.get(tls_bucket, "k") == b"x"


def test_tls_fails_for_others(tls_endpoint: Endpoint, foreign_ca: Path) -> None:
    """A client that trusts another CA alone sends nothing."""
    raw = RawS3(dataclasses.replace(tls_endpoint, ca_file=foreign_ca))
    with pytest.raises(ssl.SSLCertVerificationError):
        raw.request("GET", "/")


def test_secrets_are_not_shown(s3_endpoint: Endpoint) -> None:
    """No secret stands in the repr of an endpoint, which reports of failures show."""
    assert s3_endpoint.secret_key not in repr(s3_endpoint)


def test_raw_client_refuses_what_nobody_expected(faulty: FaultyServer) -> None:
    """A verb of the raw client raises for a status it does not name."""
    with pytest.raises(RawError, match="500 InternalError"):
        RawS3(faulty.endpoint).get("b", "e500")
