"""Many blocks of a bucket are deleted together, and each has its own result."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from kvio.types import BlockStatus
from tests.s3.failing import SMALL, look, open_faulty, place
from tests.s3.faults import Request, Response
from tests.s3.faulty import FaultyServer

LIBRARIES: Final = ("s3+boto3", "s3+minio", "s3+obstore", "s3+torch")
TOGETHER: Final = ("s3+boto3", "s3+minio", "s3+obstore")


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_key_has_its_own_result(library: str, faulty: FaultyServer) -> None:
    """Deleted, missing and refused ones, in order; the others are deleted."""
    keys = ["a", "delete-e403/x", "none", "b", "delete-e500/x", "c"]
    for key in ("a", "delete-e403/x", "b", "delete-e500/x", "c"):
        place(faulty, key, SMALL)
    with open_faulty(library, faulty) as store:
        results = store.delete_blocks(keys)

        assert [result.key for result in results] == keys
        assert [result.status for result in results] == [
            BlockStatus.OK,
            BlockStatus.FAILED,
            BlockStatus.MISSING,
            BlockStatus.OK,
            BlockStatus.FAILED,
            BlockStatus.OK,
        ]
        assert sorted(store.list_keys()) == ["delete-e403/x", "delete-e500/x"]
        assert store.delete_blocks([]) == []


@pytest.mark.parametrize("library", TOGETHER)
def test_one_request_deletes_a_thousand(library: str, faulty: FaultyServer) -> None:
    """After one look at each key; a thousand is the limit of S3."""
    keys = [f"k{number:04}" for number in range(1500)]
    for key in keys:
        place(faulty, key, SMALL)
    with open_faulty(library, faulty) as store:
        since = len(faulty.requests)
        results = store._backend.delete_blocks([*keys, keys[0]])
        asked = Counter(seen.operation for seen in faulty.requests[since:])

        assert results is not None
        assert all(result.ok for result in results[:-1])
        assert results[-1].status is BlockStatus.MISSING  # named twice: gone by then
        assert asked == {"HeadObject": 1500, "DeleteObjects": 2}
        assert list(store.list_keys()) == []


#: obstore sends DeleteObjects for one object too: it has no other request.
ONE_BY_ONE: Final = ("s3+boto3", "s3+minio")


class OldServer(FaultyServer):
    """Knows no DeleteObjects."""

    def _do(self, request: Request, fault: str) -> Response:
        if request.operation == "DeleteObjects":
            return Response(501)
        return super()._do(request, fault)


@pytest.mark.parametrize("library", ONE_BY_ONE)
def test_a_server_without_the_request_is_asked_one_by_one(library: str) -> None:
    """Nothing is lost but time."""
    with OldServer() as server, open_faulty(library, server) as store:
        for key in "abc":
            store.write_block(key, SMALL)

        assert [result.status for result in store.delete_blocks("abcd")] == [
            *[BlockStatus.OK] * 3,
            BlockStatus.MISSING,
        ]
        assert list(store.list_keys()) == []


class SilentServer(FaultyServer):
    """Deletes nothing, and answers DeleteObjects with nothing."""

    def _do(self, request: Request, fault: str) -> Response:
        if request.operation == "DeleteObjects":
            return Response(200)
        return super()._do(request, fault)


@pytest.mark.parametrize("library", ONE_BY_ONE)
def test_an_answer_that_says_nothing_is_no_deletion(library: str) -> None:
    """An answer that was lost on its way is not taken for a deletion."""
    with SilentServer() as server, open_faulty(library, server) as store:
        place(server, "a", SMALL)
        place(server, "b", SMALL)
        results = store._backend.delete_blocks(["a", "b"])

        assert results is not None
        assert all(result.ok for result in results)
        assert look(server, "a") is None
        assert look(server, "b") is None
        assert [seen.operation for seen in server.requests].count("DeleteObject") == 2
