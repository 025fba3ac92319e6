"""The number of requests per call, which decides the latency to a distant server."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from kvio import MiB
from tests.s3.faulty import FaultyServer, Seen
from tests.s3.libraries import open_s3

#: Libraries whose requests are one a verb; the others are counted in their own tests.
LIBRARIES = ("s3+boto3", "s3+minio", "s3+obstore")


def taken(server: FaultyServer, since: int) -> Counter[str]:
    """Count the requests after the first *since* by operation."""
    return Counter(seen.operation for seen in server.requests[since:])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_costs_one_request(library: str, faulty: FaultyServer) -> None:
    """Write, read and lookup cost one request each; a listing one per page, a deletion two."""
    options = {"conditional": "trust"}
    with open_s3(library, faulty.endpoint, "bucket", prefix="p", options=options) as store:
        out = bytearray(1000)
        for call, expected in (
            (lambda: store.write_block("k", bytes(1000)), {"PutObject": 1}),
            (lambda: store.write_block("k", bytes(1000), if_exists="replace"), {"PutObject": 1}),
            (lambda: store.read_block_into("k", out), {"GetObject": 1}),
            (lambda: store.stat_block("k"), {"GetObject": 1}),
            (lambda: store.count_leading(["k"] * 5), {"HeadObject": 5}),
            (lambda: list(store.list_keys()), {"ListObjects": 1}),
            (lambda: store.read_block("k", offset=5, nbytes=5), {"GetObject": 2}),
        ):
            since = len(faulty.requests)
            call()
            assert taken(faulty, since) == expected


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_blocks_of_similar_size_are_read_with_one_request_each(
    library: str, layout: str, faulty: FaultyServer
) -> None:
    """The first read predicts the length of the next; a longer block costs one more request."""
    options = {"conditional": "trust", "layout": layout}
    sizes = (1000, 1000, 990, 10, 0, 1000, 3000, 3000, 1000)
    with open_s3(library, faulty.endpoint, "bucket", prefix="p", options=options) as store:
        for number, nbytes in enumerate(sizes):
            store.write_block(f"k{number}", bytes([number + 1]) * nbytes)
        costs = []
        for number, nbytes in enumerate(sizes):
            since = len(faulty.requests)
            assert store.read_block(f"k{number}") == bytes([number + 1]) * nbytes
            costs.append(len(faulty.requests) - since)
    assert [cost for cost, nbytes in zip(costs[1:], sizes[1:], strict=True) if nbytes != 3000] == [
        1
    ] * 6
    assert costs[7] == 1
    assert max(costs) <= 4


@pytest.mark.parametrize("nbytes", [6 * MiB, 16 * MiB - 128])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_of_one_part_costs_one_request(
    library: str, nbytes: int, faulty: FaultyServer
) -> None:
    """Up to ``part_bytes`` a block is one PUT, as its receipt says."""
    options = {"conditional": "trust", "part_bytes": 16 * MiB}
    with open_s3(library, faulty.endpoint, "bucket", prefix="p", options=options) as store:
        since = len(faulty.requests)
        receipt = store.write_block("k", bytes(nbytes), if_exists="replace")
        assert taken(faulty, since) == {"PutObject": 1}
        assert receipt.mode == "put"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_large_block_costs_its_parts_and_two_checks(library: str, faulty: FaultyServer) -> None:
    """A write costs its parts and a read of the trailer; a read costs its ranges and one HEAD."""
    options = {"conditional": "trust", "part_bytes": 5 * MiB}
    data = bytes(12 * MiB)
    with open_s3(library, faulty.endpoint, "bucket", prefix="p", options=options) as store:
        since = len(faulty.requests)
        store.write_block("k", data, if_exists="replace")
        assert taken(faulty, since) == {
            "CreateMultipartUpload": 1,
            "UploadPart": 3,
            "CompleteMultipartUpload": 1,
            "GetObject": 1,
        }
        since = len(faulty.requests)
        assert store.read_block_into("k", bytearray(len(data))) == len(data)
        assert taken(faulty, since) == {"HeadObject": 1, "GetObject": 3}


@pytest.mark.parametrize(("library", "requests"), [("s3+obstore", 64), ("s3+boto3", 16)])
def test_a_batch_waits_for_many_answers_at_once(
    library: str, requests: int, faulty: FaultyServer
) -> None:
    """By default, whatever the number of processors: to a distant server only that is fast."""
    everyone = threading.Barrier(requests)

    def meet(seen: Seen) -> None:
        if seen.operation == "PutObject":
            everyone.wait(60)

    with open_s3(library, faulty.endpoint, "bucket", options={"conditional": "trust"}) as store:
        faulty.watch = meet
        results = store.write_blocks([(f"k{n}", b"bytes") for n in range(requests)])

        assert store.io_threads == requests
        assert all(result.ok for result in results)


def test_a_number_of_threads_that_is_named_is_taken(faulty: FaultyServer) -> None:
    """Instead of the default of the backend."""
    with open_s3("s3+obstore", faulty.endpoint, "bucket", io_threads=3) as store:
        assert store.io_threads == 3


def test_a_lookup_asks_for_more_at_once_while_it_finds_blocks(faulty: FaultyServer) -> None:
    """Few requests are in vain behind a short prefix, and a long one takes few round trips."""
    keys = [f"k{number:03}" for number in range(200)]
    with open_s3("s3+obstore", faulty.endpoint, "bucket", prefix="p") as store:
        asked = []
        for there in (0, 10, 40, 200):
            for key in keys[:there]:
                faulty.put("bucket", f"p/{key}", bytes(64))
            since = len(faulty.requests)
            assert store.count_leading(keys) == there
            asked.append(len(faulty.requests) - since)

    assert asked == [16, 16, 16 + 32, 200]
