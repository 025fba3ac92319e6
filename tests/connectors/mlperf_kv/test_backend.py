"""`KvioBackend` does what the program's ``StorageBackend`` promises, over every kind of store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from kvio.connectors.mlperf_kv import KvioBackend, Timing
from kvio.connectors.mlperf_kv.backend import PREFIX, block_key
from kvio.testing.payloads import payload

#: Keys as the program makes them, and some that no block may have.
_KEYS = (
    *("user_0001_turn_3", "conv-7_turn_12", "rag_doc_3_chunk_0", "precond_17"),
    *("", "-a", ".hidden", "a b", "a//b", "../a", "ключ", "k" * 300, "hashed/a"),
)


def _memory(_: Path) -> kvio.BlockStore:
    return kvio.open_store("memory")


def _files(root: Path) -> kvio.BlockStore:
    return kvio.open_store("posix-tmpfile", root=root / "kv", create=True)


def _hybrid(root: Path) -> kvio.BlockStore:
    return kvio.open_store("hybrid", root=root / "kv", create=True)


def _plain(root: Path) -> kvio.BlockStore:
    return kvio.open_store("posix-tmpfile", root=root / "kv", create=True, layout="plain")


def _direct(root: Path) -> kvio.BlockStore:
    try:
        return kvio.open_store("posix-direct", root=root / "kv", create=True)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")


def _tier(root: Path) -> kvio.BlockStore:
    store = kvio.open_store("posix-tmpfile", root=root / "kv", create=True)
    return kvio.stage(store, "8MiB", close_store=True)


_STORES = [_memory, _files, _hybrid, _plain, _direct, _tier]


@pytest.fixture(params=_STORES, ids=lambda make: make.__name__.strip("_"))
def store(request: pytest.FixtureRequest, disk_path: Path) -> Iterator[kvio.BlockStore]:
    """A store of each kind, and a tier."""
    make: Callable[[Path], kvio.BlockStore] = request.param
    with make(disk_path) as opened:
        yield opened


def _array(tokens: int, seed: int = 1) -> np.ndarray:
    shape = (3, 2, tokens, 2, 64)
    nbytes = 2 * int(np.prod(shape))
    return np.frombuffer(payload(nbytes, seed), np.float16).reshape(shape)


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return (left.shape, left.dtype, left.tobytes()) == (right.shape, right.dtype, right.tobytes())


@pytest.mark.parametrize("tokens", [0, 1, 100, 2000])
def test_an_array_is_read_as_it_was_written(store: kvio.BlockStore, tokens: int) -> None:
    """Bytes, shape and dtype, as often as it is read; what was read may be written to."""
    backend = KvioBackend(store)
    data = _array(tokens)

    backend.write("user_1_turn_1", data)

    for _ in range(3):
        found, _ = backend.read("user_1_turn_1")
        assert _same(found, data)
        assert found.flags.writeable
        found[...] = 0


def test_arrays_of_every_kind(store: kvio.BlockStore) -> None:
    """Other dtypes and shapes, and arrays with gaps, which are written without them."""
    backend = KvioBackend(store)
    numbers = np.arange(24, dtype=np.float32)
    for key, data in (
        ("flat", numbers),
        ("none", np.array(3.5)),
        ("gaps", numbers.reshape(4, 6)[:, ::2]),
        ("turned", numbers.reshape(4, 6).T),
        ("bytes", numbers.view(np.uint8)),
    ):
        backend.write(key, data)
        found, _ = backend.read(key)
        assert _same(found, data), key


def test_bytes_are_read_as_bytes(store: kvio.BlockStore) -> None:
    """Versions of the program whose entries are no arrays write any buffer and read bytes."""
    backend = KvioBackend(store)
    for data in (b"some bytes", bytearray(b"more"), memoryview(payload(70_000))):
        backend.write("key", data)
        found, _ = backend.read("key")
        assert (found == data, len(found)) == (True, len(data))


def test_the_storage_fills_the_memory_of_the_array(disk_path: Path) -> None:
    """There is no copy between: the array lies on a page, as memory for direct I/O does."""
    with _files(disk_path) as store:
        backend = KvioBackend(store)
        backend.write("key", _array(500))

        found, _ = backend.read("key")

    assert found.ctypes.data % 4096 == 0


def test_an_entry_is_replaced(store: kvio.BlockStore) -> None:
    """By another of any length, also by one of the same."""
    backend = KvioBackend(store)
    for tokens, seed in ((10, 1), (10, 2), (20, 3), (5, 4)):
        backend.write("key", _array(tokens, seed))
        assert _same(backend.read("key")[0], _array(tokens, seed))


def test_what_is_missing_is_a_key_error(store: kvio.BlockStore) -> None:
    """As of the program's own tiers; deleting it does nothing. It is counted, but no failure."""
    backend = KvioBackend(store)
    backend.write("key", _array(10))
    backend.delete("key")
    backend.delete("key")

    for key in ("key", "never"):
        with pytest.raises(KeyError, match=key):
            backend.read(key)
    assert (backend.counts.missing, backend.counts.failed) == (2, 0)


def test_a_block_that_is_gone_is_a_key_error(disk_path: Path) -> None:
    """Where something else deleted it behind the backend."""
    with _files(disk_path) as store:
        backend = KvioBackend(store)
        backend.write("key", _array(10))
        store.delete_block(block_key("key"))

        with pytest.raises(KeyError, match="key"):
            backend.read("key")


@pytest.mark.parametrize("key", _KEYS)
def test_every_key_is_an_entry(store: kvio.BlockStore, key: str) -> None:
    """Whatever is in it; no key reaches out of the place of entries."""
    backend = KvioBackend(store)

    backend.write(key, _array(3))

    assert _same(backend.read(key)[0], _array(3))
    assert [name.startswith(f"{PREFIX}/") for name in store.list_keys()] == [True]


def test_different_keys_are_different_entries() -> None:
    """Also those that no block may have, and those that look like their replacements."""
    keys = [*_KEYS, *(block_key(key).removeprefix(f"{PREFIX}/") for key in _KEYS)]
    distinct = set(keys)

    assert len({block_key(key) for key in distinct}) == len(distinct)


def test_sizes_of_entries(store: kvio.BlockStore) -> None:
    """The bytes, shape and type of each, and the sum, until it is deleted."""
    backend = KvioBackend(store)
    backend.write("a", _array(10))
    backend.write("b", b"1234")

    expected = {"shape": (3, 2, 10, 2, 64), "dtype": "float16", "size": 15_360}
    assert backend.metadata["a"] == expected
    assert backend.metadata["b"]["size"] == 4
    assert backend.nbytes == 15_364
    backend.delete("a")
    assert (list(backend.metadata), backend.nbytes) == (["b"], 4)


def test_clear_removes_entries_alone(store: kvio.BlockStore) -> None:
    """Of this run and of an earlier one, and no other block of the store."""
    KvioBackend(store).write("earlier", _array(3))
    store.write_block("others/block", b"bytes")
    backend = KvioBackend(store)
    with pytest.raises(KeyError):
        backend.read("earlier")
    assert list(store.list_keys()) == ["others/block"]

    backend.write("key", _array(3))
    backend.clear()

    assert list(store.list_keys()) == ["others/block"]
    assert (backend.metadata, backend.nbytes) == ({}, 0)


def test_host_and_device_make_the_total(store: kvio.BlockStore) -> None:
    """Each is a time of its own; what a tier accepted has asked no device yet."""
    backend = KvioBackend(store)

    wrote = backend.write("key", _array(1000))
    _, read = backend.read("key")

    for timing in (wrote, read):
        assert isinstance(timing, Timing)
        assert timing.host > 0
        assert timing.total == pytest.approx(timing.device + timing.host)
    assert (wrote.device == 0.0) == isinstance(store, kvio.StagingTier)
    assert read.device > 0


def test_timings_are_of_the_class_that_is_given() -> None:
    """The program has its own, and passes it on as it is."""
    with kvio.open_store("memory") as store:
        backend = KvioBackend(store, timing=dict)
        backend.write("key", b"bytes")
        _, timing = backend.read("key")

    assert set(timing) == {"total", "device", "host"}


class _Recording:
    """A store that notes which blocks were dropped and read, in order."""

    def __init__(self, store: kvio.BlockStore) -> None:
        self._store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def drop_cache(self, keys: Iterable[str]) -> list[kvio.BlockResult]:
        found = list(keys)
        self.calls += [f"drop {key}" for key in found]
        return self._store.drop_cache(found)

    def read_block_into(self, key: str, out: memoryview) -> int:
        self.calls.append(f"read {key}")
        return self._store.read_block_into(key, out)


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_reads_are_cold_unless_told_otherwise(*, cold: bool) -> None:
    """Each read of an entry comes behind the drop of its pages."""
    with kvio.open_store("memory") as store:
        recording: Any = _Recording(store)
        backend = KvioBackend(recording, cold_reads=cold)
        backend.write("key", b"bytes")
        for _ in range(2):
            backend.read("key")

    name = block_key("key")
    once = [f"drop {name}", f"read {name}"] if cold else [f"read {name}"]
    assert recording.calls == once * 2


def test_damage_is_an_error_and_counted(disk_path: Path) -> None:
    """The program passes over errors in silence; the counts do not."""
    with _files(disk_path) as store:
        backend = KvioBackend(store)
        backend.write("key", _array(100))
        path = store.path_of(block_key("key"))
        _flip(path)

        with pytest.raises(kvio.CorruptBlockError):
            backend.read("key")

    assert backend.counts.failed == 1
    assert "CorruptBlockError" in backend.counts.first_failure
    assert backend.counts.read_blocks == 0


def _flip(path: Path) -> None:
    stored = bytearray(path.read_bytes())
    stored[100] ^= 1
    path.write_bytes(stored)


def test_a_block_of_another_length_is_an_error(disk_path: Path) -> None:
    """An array would be filled in part."""
    with _files(disk_path) as store:
        backend = KvioBackend(store)
        for data in (b"short", b"a longer block than that which was written"):
            backend.write("key", b"twelve bytes")
            store.write_block(block_key("key"), data, if_exists="replace")
            with pytest.raises(kvio.BlockSizeError):
                backend.read("key")

    assert backend.counts.failed == 2


def test_counts_are_of_what_was_done(store: kvio.BlockStore) -> None:
    """Entries and their bytes."""
    backend = KvioBackend(store)
    backend.write("a", b"12345")
    backend.write("b", b"123")
    backend.read("a")
    backend.read("a")
    backend.delete("b")
    counts = backend.counts

    assert (counts.written_blocks, counts.written_bytes) == (2, 8)
    assert (counts.read_blocks, counts.read_bytes) == (2, 10)
    assert (counts.deleted_blocks, counts.failed, counts.first_failure) == (1, 0, "")


class _Overtaken:
    """A store in which a second write of a key begins when the first one is stored."""

    def __init__(self, store: kvio.Store, begin: Callable[[], None]) -> None:
        self._store = store
        self._second = threading.Thread(target=begin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write_block(self, key: str, data: Any, *, if_exists: Any) -> kvio.Receipt:
        receipt = self._store.write_block(key, data, if_exists=if_exists)
        if self._second.ident is None:
            self._second.start()
            self._second.join(0.2)  # it must wait for the first one to end
        return receipt

    def finish(self) -> None:
        self._second.join()


def test_two_writers_of_one_key_leave_one_of_their_entries() -> None:
    """Shape and bytes are of the same write, although one came between the other's two."""
    first, second = _array(3, 1), _array(5, 2)
    with kvio.open_store("memory") as store:
        overtaken: Any = _Overtaken(store, lambda: backend.write("key", second))
        backend = KvioBackend(overtaken)
        backend.write("key", first)
        overtaken.finish()
        found, _ = backend.read("key")

    assert any(_same(found, data) for data in (first, second))
    assert backend.counts.failed == 0


def test_the_directory_of_a_store_of_files(disk_path: Path) -> None:
    """From it the program takes the capacity; other stores have none."""
    for make, has in ((_files, True), (_tier, True), (_memory, False)):
        with make(disk_path) as store:
            backend = KvioBackend(store)
            assert hasattr(backend, "base_path") == has
            if has:
                assert backend.base_path == disk_path / "kv"
