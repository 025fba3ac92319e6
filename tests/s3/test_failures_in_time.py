"""A server that does not respond blocks no call beyond its timeout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

import kvio
from kvio import MiB
from kvio.types import BlockStatus
from tests.s3.failing import (
    BRISK,
    LARGE,
    SMALL,
    look,
    open_faulty,
    place,
    requests_per_attempt,
    retries_made,
    stored,
)
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import LIBRARIES

#: In seconds: the library itself waits longer, so that a verb that has ended was abandoned.
WAIT: Final = 0.4
LONG_S: Final = 60.0


def _batch(results: list[kvio.BlockResult]) -> None:
    """Raise the error that a single call would have raised."""
    assert [result.status for result in results] == [BlockStatus.TIMEOUT] * len(results)
    error = results[0].error
    assert error is not None
    raise error


CALLS: Final[Mapping[str, Callable[[kvio.Store, str, bytearray], object]]] = {
    "write": lambda s, k, _: s.write_block(k, SMALL, if_exists="replace", timeout=WAIT),
    "write-keeping": lambda s, k, _: s.write_block(k, SMALL, timeout=WAIT),
    "write-new": lambda s, k, _: s.write_block(k, SMALL, if_exists="error", timeout=WAIT),
    "write-parts": lambda s, k, _: s.write_block(k, LARGE, if_exists="replace", timeout=WAIT),
    "read-into": lambda s, k, out: s.read_block_into(k, out, timeout=WAIT),
    "read": lambda s, k, _: s.read_block(k, timeout=WAIT),
    "read-range": lambda s, k, out: s.read_block_into(k, out, offset=5, nbytes=9, timeout=WAIT),
    "stat": lambda s, k, _: s.stat_block(k, timeout=WAIT),
    "contains": lambda s, k, _: s.contains(k, timeout=WAIT),
    "count": lambda s, k, _: s.count_leading([k, f"{k}2"], timeout=WAIT),
    "verify": lambda s, k, _: s.verify_block(k, timeout=WAIT),
    "delete": lambda s, k, _: s.delete_block(k, timeout=WAIT),
    "list": lambda s, k, _: list(s.list_keys(k.rpartition("/")[0], timeout=WAIT)),
    "submit-write": lambda s, k, _: s.submit_write(k, SMALL, timeout=WAIT).result(LONG_S),
    "submit-read": lambda s, k, out: s.submit_read_into(k, out, timeout=WAIT).result(LONG_S),
    "writes": lambda s, k, _: _batch(s.write_blocks([(k, SMALL), (f"{k}2", SMALL)], timeout=WAIT)),
    "reads": lambda s, k, out: _batch(s.read_blocks_into([(k, out)], timeout=WAIT)),
    "deletes": lambda s, k, _: _batch(s.delete_blocks([k, f"{k}2"], timeout=WAIT)),
}


@pytest.mark.parametrize("word", ["hang", "slowdrip"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_verb_obeys_its_timeout(library: str, word: str, faulty: FaultyServer) -> None:
    """Each raises StorageTimeoutError and never writes to the caller's buffer afterwards."""
    fetching = ("read-into", "read", "read-range", "stat", "contains", "verify", "reads", "list")
    names = [name for name in CALLS if word == "hang" or name in fetching]
    buffers = {name: bytearray(len(SMALL)) for name in names}
    for name in names:
        if not name.startswith("write"):
            place(faulty, f"{word}/{name}/block", SMALL)
    store = open_faulty(library, faulty, BRISK)

    def call(name: str) -> str:
        try:
            CALLS[name](store, f"{word}/{name}/block", buffers[name])
        except kvio.KvioError as error:
            return type(error).__name__
        return "ended"

    with ThreadPoolExecutor(len(names)) as pool:
        outcomes = dict(zip(names, pool.map(call, names), strict=True))

    assert outcomes == dict.fromkeys(names, "StorageTimeoutError")
    faulty.release()
    store.close(timeout=LONG_S)
    assert not any(map(any, buffers.values()))
    written = [name for name in names if name.startswith("write")]
    assert [look(faulty, f"{word}/{name}/block") for name in written] == [None] * len(written)


#: A block that takes some seconds to be taken slowly, by one request.
HUGE: Final = bytes(16 * MiB)
#: To these the wait for an answer begins with the request: docs/s3.md says so.
WAITING_AT_ONCE: Final = ("s3+obstore", "s3+s3dlio")


@pytest.mark.parametrize("library", [name for name in LIBRARIES if name not in WAITING_AT_ONCE])
def test_a_slow_connection_does_not_time_out(library: str, faulty: FaultyServer) -> None:
    """A body sent slowly exceeds no timeout but request_timeout_s."""
    pause = {"connect_timeout_s": 4.0, "read_timeout_s": 4.0, "request_timeout_s": LONG_S}

    with open_faulty(library, faulty, {**pause, "part_bytes": 2 * len(HUGE)}) as store:
        store.write_block("slowtake/block", HUGE, if_exists="replace")

    assert look(faulty, "slowtake/block") == stored("slowtake/block", HUGE)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_body_times_out_after_request_timeout_s(library: str, faulty: FaultyServer) -> None:
    """A body that still flows times out; nothing is visible, and nothing is retried."""
    data = HUGE * 2
    store = open_faulty(library, faulty, {**BRISK, "part_bytes": 2 * len(data)})

    with pytest.raises(kvio.StorageTimeoutError):
        store.write_block("slowtake/block", data, if_exists="replace")

    assert look(faulty, "slowtake/block") is None
    assert retries_made(store) == 0
    faulty.release()
    store.close(timeout=LONG_S)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_timeout_of_a_store_is_that_of_its_calls(library: str, faulty: FaultyServer) -> None:
    """A call without a timeout has the store's, and a later call succeeds."""
    place(faulty, "good/block", SMALL)
    store = open_faulty(library, faulty, BRISK, timeout=WAIT)

    with pytest.raises(kvio.StorageTimeoutError):
        store.read_block("hang/block")

    assert store.read_block("good/block", timeout=LONG_S) == SMALL
    faulty.release()
    store.close(timeout=LONG_S)


@pytest.mark.parametrize("name", ["read-into", "read-range", "write", "write-keeping"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_retries_end_with_the_timeout(library: str, name: str, faulty: FaultyServer) -> None:
    """No retry is made after the call has timed out."""
    word = "put-e500/create-e500" if name.startswith("write") else "e500"
    store = open_faulty(library, faulty, {"retries": 100})

    with pytest.raises(kvio.StorageTimeoutError):
        CALLS[name](store, f"{word}/block", bytearray(len(SMALL)))

    asked = len(faulty.requests)
    store.close(timeout=LONG_S)
    assert len(faulty.requests) <= asked + requests_per_attempt(library, "e500")
