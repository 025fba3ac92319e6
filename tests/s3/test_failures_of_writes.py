"""A failed write has no receipt, leaves no broken object, and is not retried if ambiguous."""

from __future__ import annotations

from typing import Final

import pytest

import kvio
from kvio.backends.s3.errors import ErrorKind
from tests.s3.failing import (
    BUCKET,
    ENDS_UNTOLD,
    LARGE,
    SMALL,
    ForgetfulServer,
    HealingServer,
    attempt,
    described,
    error_of,
    look,
    open_faulty,
    place,
    retries_made,
    stored,
    unfinished,
)
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import LIBRARIES

#: One step of an upload in parts fails: what the write comes to.
STEPS: Final = {
    "create-e403": ErrorKind.DENIED,
    "part-e500": ErrorKind.BUSY,
    "part-e403": ErrorKind.DENIED,
    "part-reset": ErrorKind.LOST,
    "part-resetsend": ErrorKind.LOST,
    "complete-e500": ErrorKind.BUSY,
    "complete-e403": ErrorKind.DENIED,
    "complete-reset": ErrorKind.LOST,
    "completeerror": ErrorKind.BUSY,
    "lostpart": ErrorKind.MANGLED,
}
#: These show nothing of what may have been stored before.
_LOOKS_AFTER: Final = {"get-e403": ErrorKind.DENIED, "get-trunc": ErrorKind.LOST}


@pytest.mark.parametrize("durability", ["visible", "durable"])
@pytest.mark.parametrize("word", STEPS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_failed_upload_leaves_nothing(
    library: str, word: str, durability: str, faulty: FaultyServer
) -> None:
    """Whichever step fails, there is no receipt and no object, and the upload is aborted."""
    key = f"{word}/block"
    with (
        open_faulty(library, faulty, {"durability": durability}) as store,
        pytest.raises(kvio.KvioError) as caught,
    ):
        store.write_block(key, LARGE, if_exists="replace")

    reported = {STEPS[word]}
    if word.startswith("part-"):
        reported.add(ENDS_UNTOLD.get(library, STEPS[word]))
    assert described(caught.value) in map(error_of, reported)
    assert look(faulty, key) is None
    assert unfinished(faulty, library) == []
    assert retries_made(store) == 0


@pytest.mark.parametrize(
    "word", ["part-e500", "part-resetsend", "complete-e500", "completeerror", "lostpart"]
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_retry_repeats_the_whole_upload(library: str, word: str) -> None:
    """After a transient error the whole block is uploaded again."""
    key = f"{word}/block"
    with HealingServer(library) as server, open_faulty(library, server, {"retries": 2}) as store:
        receipt = store.write_block(key, LARGE, if_exists="replace")

        assert (receipt.nbytes, receipt.existed) == (len(LARGE), False)
        assert look(server, key) == stored(key, LARGE)
        assert unfinished(server, library) == []
        assert retries_made(store) > 0


@pytest.mark.parametrize("word", _LOOKS_AFTER)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_receipt_without_a_check_of_the_stored_object(
    library: str, word: str, faulty: FaultyServer
) -> None:
    """If the check fails, the write fails, and the upload is not repeated."""
    key = f"{word}/block"
    with (
        open_faulty(library, faulty, {"retries": 1}) as store,
        pytest.raises(kvio.KvioError) as caught,
    ):
        store.write_block(key, LARGE, if_exists="replace")

    assert described(caught.value) == error_of(_LOOKS_AFTER[word])
    assert faulty.count(f"p/{key}", "CompleteMultipartUpload") == 1
    assert look(faulty, key) in (None, stored(key, LARGE))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_durable_block_is_read_back(library: str, faulty: FaultyServer) -> None:
    """If the server verifies no checksum, a small block that was stored wrong is detected."""
    with (
        open_faulty(library, faulty, {"durability": "durable"}) as store,
        pytest.raises(kvio.TransientStorageError),
    ):
        store.write_block("lieput/block", SMALL, if_exists="replace")


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("word", ["put-reset,complete-reset", "put-e500,complete-e500"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_ambiguous_conditional_write_is_not_retried(
    library: str, word: str, data: bytes, faulty: FaultyServer
) -> None:
    """With ``error`` a lost response fails the write: a retry would find its own block."""
    key = f"{word.replace(',', '/')}/block"
    with open_faulty(library, faulty, {"retries": 3}) as store:
        if not store.capabilities.exclusive_create:
            pytest.skip("the library sends no conditions: nothing distinguishes its own block")
        with pytest.raises(kvio.TransientStorageError):
            store.write_block(key, data, if_exists="error")

        assert retries_made(store) == 0
    published = ("PutObject", "CompleteMultipartUpload")
    assert [seen.operation in published for seen in faulty.requests].count(True) == 1


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_write_whose_response_was_lost_is_whole(library: str, data: bytes) -> None:
    """The stored block stays whole; with ``keep`` the retry finds and keeps it."""
    with ForgetfulServer() as server, open_faulty(library, server, {"retries": 3}) as store:
        if not store.capabilities.exclusive_create:
            pytest.skip("the library sends no conditions: nothing distinguishes its own block")
        with pytest.raises(kvio.TransientStorageError):
            store.write_block("block", data, if_exists="error")

        assert retries_made(store) == 0
        assert look(server, "block") == stored("block", data)
        assert store.write_block("block", data).existed
        assert server.uploads(BUCKET) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_server_that_ignores_if_none_match_is_detected(
    library: str, faulty: FaultyServer
) -> None:
    """Exclusive creation is not promised, a note says why, and an existing key is refused."""
    key = "ignores-conditions/block"
    with open_faulty(
        library, faulty, {"conditional": "probe"}, prefix="ignores-conditions"
    ) as store:
        capabilities = store.capabilities

        assert not capabilities.exclusive_create
        assert any("If-None-Match" in note for note in capabilities.notes)
        store.write_block(key, SMALL, if_exists="error")
        with pytest.raises(kvio.BlockExistsError):
            store.write_block(key, SMALL, if_exists="error")
        assert list(store.list_keys()) == [key]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_server_that_supports_if_none_match_is_used(library: str, faulty: FaultyServer) -> None:
    """If library and server support it, creation is exclusive; the probe leaves no object."""
    with open_faulty(library, faulty, {"conditional": "probe"}) as store:
        conditional = store._backend.traits.conditional  # type: ignore[attr-defined]

        assert store.capabilities.exclusive_create == conditional
        assert list(store.list_keys()) == []


@pytest.mark.parametrize("word", ["delete-e500", "delete-e403"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_failed_deletion_is_an_error(library: str, word: str, faulty: FaultyServer) -> None:
    """A failed deletion raises an error."""
    key = f"{word}/delete/block"
    place(faulty, key, SMALL)
    conditions = {"e500": ErrorKind.BUSY, "e403": ErrorKind.DENIED}
    with open_faulty(library, faulty) as store:
        assert attempt(store, word, "delete") == error_of(conditions[word.rpartition("-")[2]])

    assert look(faulty, key) is not None


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_failure_spares_the_rest_of_a_batch(library: str, faulty: FaultyServer) -> None:
    """Each block of a batch has its own outcome."""
    keys = ["a/block", "e403/block", "e500/block", "z/block"]
    with open_faulty(library, faulty) as store:
        written = store.write_blocks([(key, SMALL) for key in keys], if_exists="replace")

        assert [result.ok for result in written] == [True, False, False, True]
        assert [type(result.error) for result in written[1:3]] == [
            kvio.AccessDeniedError,
            kvio.TransientStorageError,
        ]
        assert sorted(store.list_keys("z")) == ["z/block"]
