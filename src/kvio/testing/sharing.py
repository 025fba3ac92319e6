"""Many threads and many processes with the same storage."""

from __future__ import annotations

import copy
import os
import pickle
import select
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvio
from kvio.testing.hooks import StoreTests
from kvio.testing.payloads import payload

_THREADS = 8
_CHILD_LIMIT_MS = 60_000


def runs_in_child(work: Callable[[], bool]) -> bool:
    """Run *work* in a forked child; return whether it returned True within a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, from 3.12 on
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = poll.poll(_CHILD_LIMIT_MS)
    os.close(descriptor)
    if not ended:
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0 and bool(ended)


class SharingTests(StoreTests):
    """Thread-safety, pickling and forking."""

    def test_threads_write_and_read_their_own_keys(self, store: kvio.Store) -> None:
        """Threads that use different keys do not disturb each other."""

        def work(thread: int) -> bool:
            for i in range(self.rounds):
                data = payload(1 + i * 733, 100 * thread + i)
                store.write_block(f"t{thread}/{i}", data)
                if store.read_block(f"t{thread}/{i}") != data:
                    return False
            return all(store.delete_block(f"t{thread}/{i}") for i in range(self.rounds))

        with ThreadPoolExecutor(_THREADS) as pool:
            assert all(pool.map(work, range(_THREADS)))
        assert list(store.list_keys()) == []

    def test_one_of_many_threads_creates_a_key(self, store: kvio.Store) -> None:
        """With ``error`` one thread wins; with ``keep`` all agree on the existing block."""
        if not store.capabilities.exclusive_create:
            pytest.skip("the backend does not promise exclusive_create")
        together = threading.Barrier(_THREADS)

        def work(thread: int) -> int:
            won = 0
            for i in range(self.rounds):
                together.wait(60)
                try:
                    store.write_block(f"key/{i}", payload(3000, thread), if_exists="error")
                except kvio.BlockExistsError:
                    continue
                won += 1
            return won

        with ThreadPoolExecutor(_THREADS) as pool:
            assert sum(pool.map(work, range(_THREADS))) == self.rounds
        whole = {payload(3000, thread) for thread in range(_THREADS)}
        assert all(bytes(store.read_block(f"key/{i}")) in whole for i in range(self.rounds))
        if self.has_hook("raw_leftovers"):
            assert self.raw_leftovers(store) == []

    def test_the_first_of_many_keeping_threads_stays(self, store: kvio.Store) -> None:
        """With ``keep`` exactly one of several writers of equal length stores its bytes."""
        if not store.capabilities.exclusive_create:
            pytest.skip("the backend does not promise exclusive_create")
        together = threading.Barrier(_THREADS)

        def work(thread: int) -> list[bool]:
            receipts = []
            for i in range(self.rounds):
                together.wait(60)
                receipts.append(store.write_block(f"key/{i}", payload(3000, thread)).existed)
            return receipts

        with ThreadPoolExecutor(_THREADS) as pool:
            existed = list(pool.map(work, range(_THREADS)))
        for i in range(self.rounds):
            writers = [thread for thread in range(_THREADS) if not existed[thread][i]]
            assert len(writers) == 1
            assert store.read_block(f"key/{i}") == payload(3000, writers[0])

    @pytest.mark.parametrize("nbytes", [4096, 300_001])
    def test_readers_never_see_a_mix(self, store: kvio.Store, nbytes: int) -> None:
        """While writers replace a block, every read is one of the versions, whole."""
        store.write_block("block", bytes(nbytes))
        finished = threading.Event()

        def replace(thread: int) -> None:
            for i in range(self.rounds):
                version = bytes([1 + (2 * i + thread) % 255]) * nbytes
                store.write_block("block", version, if_exists="replace")

        def read(_: int) -> int:
            reads = 0
            out = bytearray(nbytes)
            while not finished.is_set() or reads == 0:
                assert store.read_block_into("block", out) == nbytes
                assert out == out[:1] * nbytes
                view = store.read_block("block")
                assert view == bytes(view[:1]) * nbytes
                [result] = store.read_blocks_into([("block", out)])
                assert result.ok
                assert out == out[:1] * nbytes
                reads += 1
            return reads

        with ThreadPoolExecutor(5) as pool:
            readers = [pool.submit(read, i) for i in range(3)]
            try:
                list(pool.map(replace, range(2)))
            finally:
                finished.set()
            assert all(reader.result(60) for reader in readers)

    def test_readers_see_all_of_one_length(self, store: kvio.Store) -> None:
        """While a block is replaced by longer and shorter ones, length and bytes always agree."""
        lengths = (0, 100, 4096, 70_001)
        store.write_block("block", b"")
        finished = threading.Event()

        def read(_: int) -> bool:
            out = bytearray(80_000)
            while not finished.is_set():
                got = store.read_block_into("block", out)
                if got not in lengths or out[:got] != bytes([lengths.index(got)]) * got:
                    return False
                if store.stat_block("block").nbytes not in lengths:
                    return False
            return True

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read, i) for i in range(3)]
            try:
                for i in range(2 * self.rounds):
                    at = i % len(lengths)
                    store.write_block("block", bytes([at]) * lengths[at], if_exists="replace")
            finally:
                finished.set()
            assert all(reader.result(60) for reader in readers)

    def test_a_pickled_store_opens_the_same_medium(self, store: kvio.Store) -> None:
        """A shared store pickles as its URL and settings; any other says it cannot."""
        if not store.capabilities.shared:
            with pytest.raises(kvio.UnsupportedError):
                pickle.dumps(store)
            return
        store.write_block("before", b"bytes")

        with pickle.loads(pickle.dumps(store)) as other:  # noqa: S301  # our own bytes
            assert other.url == store.url.without_secrets()
            assert self.holds(other, "before", b"bytes")
            other.write_block("after", b"other")

        assert self.holds(store, "after", b"other")
        with copy.copy(store) as other:
            assert sorted(other.list_keys()) == ["after", "before"]

    def test_two_stores_over_one_medium(self, store: kvio.Store, tmp_path: Path) -> None:
        """What one store of shared storage does, another sees at once."""
        if not store.capabilities.shared:
            pytest.skip("the storage is not shared: capabilities.shared")
        with self.open_now(tmp_path) as other:
            store.write_block("dir/block", b"first")

            assert other.contains("dir/block")
            with pytest.raises(kvio.BlockExistsError):
                other.write_block("dir/block", b"later", if_exists="error")
            other.write_block("dir/block", b"other", if_exists="replace")

            assert self.holds(store, "dir/block", b"other")
            assert other.delete_block("dir/block")
            assert not store.contains("dir/block")

    def test_a_forked_child_uses_the_store(self, store: kvio.Store) -> None:
        """A child reads what its parent wrote and writes what its parent reads; both go on."""
        if not store.capabilities.shared:
            pytest.skip("the storage is not shared: capabilities.shared")
        if not store.capabilities.usable_after_fork:
            pytest.skip("the backend does not promise usable_after_fork")
        futures = [store.submit_write(f"parent/{i}", payload(5000, i)) for i in range(20)]
        store.flush()

        def child() -> bool:
            out = bytearray(5000)
            read = [("parent/1", bytearray(5000)), ("parent/2", bytearray(5000))]
            store.write_block("child/1", b"bytes")
            store.submit_write("child/2", payload(90_000, 2)).result(30)
            return (
                store.read_block_into("parent/0", out, timeout=30) == 5000
                and out == payload(5000, 0)
                and all(r.ok for r in store.read_blocks_into(read, timeout=30))
            )

        assert runs_in_child(child)
        assert all(future.result(60).nbytes == 5000 for future in futures)
        assert self.holds(store, "child/1", b"bytes")
        assert self.holds(store, "child/2", payload(90_000, 2))
        assert store.submit_write("parent/after", b"bytes").result(60).nbytes == 5

    def test_a_forked_child_is_served_or_refused(self, store: kvio.Store) -> None:
        """Without the promise, calls in a child raise at once, and the parent continues."""
        store.write_block("block", b"bytes")
        store.submit_write("other", b"bytes").result(60)
        promised = store.capabilities.usable_after_fork

        def child() -> bool:
            calls: list[Callable[[], object]] = [
                lambda: store.read_block("block"),
                lambda: store.write_block("child", b"bytes"),
                lambda: store.contains("block", timeout=30),
                lambda: store.submit_read_into("block", bytearray(5)).result(30),
            ]
            for call in calls:
                try:
                    call()
                except kvio.UnsupportedError:
                    if promised:
                        return False
            return True

        assert runs_in_child(child)
        assert self.holds(store, "block", b"bytes")
        store.write_block("after", b"bytes")

    def test_a_fork_under_load_leaves_no_lock_behind(self, store: kvio.Store) -> None:
        """A child forked while threads are at work can use and close the store."""
        if not store.capabilities.shared:
            pytest.skip("the storage is not shared: capabilities.shared")
        if not store.capabilities.usable_after_fork:
            pytest.skip("the backend does not promise usable_after_fork")
        store.write_block("block", payload(5000, 1))
        finished = threading.Event()

        def load(thread: int) -> None:
            i = 0
            while not finished.is_set():
                store.write_block(f"load/{thread}", payload(5000, i), if_exists="replace")
                store.read_block(f"load/{thread}", timeout=60)
                i += 1

        def child() -> bool:
            same = store.read_block("block", timeout=30) == payload(5000, 1)
            store.write_block("child", b"bytes", if_exists="replace")
            store.close(timeout=30)
            return same

        with ThreadPoolExecutor(3) as pool:
            loads = [pool.submit(load, i) for i in range(3)]
            try:
                assert all(runs_in_child(child) for _ in range(5))
            finally:
                finished.set()
        assert [future.exception() for future in loads] == [None] * 3
        assert self.holds(store, "child", b"bytes")
