"""The fakes misbehave exactly as instructed, and otherwise not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvio
from kvio.testing.fakes import VERBS, BatchlessBackend, FaultyBackend, LatencyBackend, WrappedStore

_LIMIT_S = 60.0


@pytest.fixture
def faulty() -> Iterator[WrappedStore[FaultyBackend]]:
    """Yield a memory store that fails when asked to."""
    with WrappedStore("memory://", FaultyBackend, io_threads=1) as store:
        yield store


@pytest.fixture
def gated() -> Iterator[WrappedStore[LatencyBackend]]:
    """Yield a memory store with a gate and one I/O thread."""
    with WrappedStore("memory://", LatencyBackend, io_threads=1) as store:
        yield store
        store.wrapper.release()


def test_a_fault_hits_the_calls_it_names(faulty: WrappedStore[FaultyBackend]) -> None:
    """The n-th call and those after it fail as often as asked, earlier and later ones do not."""
    faulty.wrapper.fail("write_block", kvio.StorageFullError("no room", errno=28), nth=2, times=2)

    outcomes = []
    for i in range(5):
        try:
            faulty.write_block(f"key/{i}", b"bytes")
        except kvio.StorageFullError as exc:
            outcomes.append(exc.errno)
        else:
            outcomes.append(None)

    assert outcomes == [None, 28, 28, None, None]
    assert sorted(faulty.list_keys()) == ["key/0", "key/3", "key/4"]


def test_a_fault_of_one_key_spares_the_others(faulty: WrappedStore[FaultyBackend]) -> None:
    """In a batch only the block that was named fails, and it fails with its error."""
    error = kvio.TransientStorageError("busy", errno=16, key="b")
    faulty.wrapper.fail("write_block", error, key="b")
    faulty.wrapper.fail("read_block_into", kvio.CorruptBlockError("broken", key="c"), key="c")

    written = faulty.write_blocks([(key, b"bytes") for key in "abc"])
    read = faulty.read_blocks_into([(key, bytearray(5)) for key in "abc"])

    assert [r.status for r in written] == ["ok", "failed", "ok"]
    assert written[1].error is error
    assert [r.status for r in read] == ["ok", "missing", "corrupt"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_can_fail(faulty: WrappedStore[FaultyBackend], verb: str) -> None:
    """A fault reaches the caller through the store, for every verb that can have one."""
    faulty.write_block("key", b"bytes")
    faulty.wrapper.fail(verb, kvio.StorageError("failed", errno=5))
    calls: dict[str, Callable[[], object]] = {
        "write_block": lambda: faulty.write_block("key", b"bytes"),
        "read_block_into": lambda: faulty.read_block_into("key", bytearray(5)),
        "stat_block": lambda: faulty.stat_block("key"),
        "delete_block": lambda: faulty.delete_block("key"),
        "list_keys": lambda: list(faulty.list_keys()),
        "count_leading": lambda: faulty.count_leading(["key"]),
        "sweep": lambda: faulty.sweep(),
    }
    if verb == "verify_block":
        assert faulty.verify_block("key").status is kvio.BlockStatus.FAILED
    else:
        with pytest.raises(kvio.StorageError):
            calls[verb]()

    assert (verb, "key") in faulty.wrapper.calls or (verb, None) in faulty.wrapper.calls


def test_a_shut_gate_holds_calls_until_it_opens(gated: WrappedStore[LatencyBackend]) -> None:
    """Held writes are not done, and end well once the gate is open."""
    gated.wrapper.shut()
    future = gated.submit_write("key", b"bytes")

    assert gated.wrapper.wait_until_held(1, limit_s=_LIMIT_S)
    assert not future.done()
    assert not gated.contains("key")

    gated.wrapper.release()

    assert future.result(_LIMIT_S).nbytes == 5


def test_waiting_for_calls_that_never_come_gives_up(gated: WrappedStore[LatencyBackend]) -> None:
    """Where nothing is held the wait ends and says so."""
    assert not gated.wrapper.wait_until_held(1, limit_s=0.0)


def test_hidden_batches_are_fanned_out(tmp_path: Path) -> None:
    """A batchless store does not promise batches, and writes each block by itself."""
    with WrappedStore(f"posix-tmpfile://{tmp_path}", BatchlessBackend) as store:
        results = store.write_blocks([(f"key/{i}", b"bytes") for i in range(10)])

        assert not store.capabilities.native_batch
        assert store.wrapper.inner.capabilities.native_batch
    assert all(result.ok for result in results)
