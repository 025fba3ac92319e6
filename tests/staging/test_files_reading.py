"""Blocks of a tier that are read like files."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from tests.posix import faultlab
from tests.staging.controlled import LONG_S, ControlledBackend, open_controlled, staged
from tests.staging.files import CAPACITY, PAGE, absolute, returned


@pytest.fixture
def store() -> WrappedStore[ControlledBackend]:
    """A store that claims to make blocks durable."""
    return open_controlled(level="durable")


@pytest.fixture
def tier(store: WrappedStore[ControlledBackend]) -> Iterator[kvio.StagingTier]:
    """A small tier before it, with nowhere to spill to."""
    with staged(store, CAPACITY, timeout=LONG_S) as tier:
        yield tier


@pytest.fixture
def spilling(store: WrappedStore[ControlledBackend], tmp_path: Path) -> Iterator[kvio.StagingTier]:
    """The same with a directory to spill to."""
    with staged(store, CAPACITY, timeout=LONG_S, spool=tmp_path) as tier:
        yield tier


# Reading


def test_a_reader_sees_what_is_staged_when_it_is_opened(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """And only that, whatever is written, drained or deleted afterwards."""
    tier.pause()
    old = payloads.payload(20_000, 1)
    tier.write_block("k", old)
    reader = tier.open("k", "rb")
    tier.write_block("k", b"newer")
    tier.resume()
    tier.barrier(timeout=LONG_S)
    tier.delete_block("k")
    tier.pause()
    tier.write_block("noise", b"\xff" * (CAPACITY - 5 * PAGE))

    assert reader.seek(10_000) == 10_000
    assert reader.read() == old[10_000:]
    assert reader.seek(0) == 0
    assert reader.read() == old
    assert (reader.key, reader.nbytes) == ("k", 20_000)
    reader.close()
    assert tier.stats().used_bytes == CAPACITY - 5 * PAGE
    assert store.wrapper.peek("k") is None


def test_a_stored_block_is_read_in_ranges(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Of a large block only what is asked for, give or take a buffer."""
    data = payloads.payload(3 * kvio.MiB, 2)
    store.write_block("k", data)
    with tier.open("k", "rb") as reader:
        reader.seek(-5, io.SEEK_END)
        tail = reader.read()
        read = store.stats().bytes_read
        whole = bytearray(len(data))
        reader.seek(0)
        count = reader.readinto(whole)

    assert tail == data[-5:]
    assert read <= kvio.MiB
    assert (count, bytes(whole)) == (len(data), data)
    with pytest.raises(kvio.BlockNotFoundError):
        tier.open("absent", "rb")


@pytest.mark.parametrize("nbytes", [3 * kvio.MiB, 2 * kvio.MiB, 5])
def test_a_stored_block_that_was_replaced_is_not_mixed(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend], nbytes: int
) -> None:
    """The next read that asks the store fails; another reader sees the new block."""
    store.write_block("k", b"o" * (3 * kvio.MiB))
    with tier.open("k", "rb") as reader:
        first = reader.read(10)
        store.write_block("k", b"n" * nbytes, if_exists="replace")
        reader.seek(-100, io.SEEK_END)
        with pytest.raises(kvio.TransientStorageError, match="replaced"):
            reader.read(10)

    assert first == b"o" * 10
    with tier.open("k", "rb") as reader:
        assert reader.read() == b"n" * nbytes


@given(
    st.lists(
        st.tuples(st.integers(-50_000, 90_000), st.sampled_from([0, 1, 2]), st.integers(0, 300_000))
    ),
    st.sampled_from(["staged", "stored"]),
)
def test_a_reader_does_what_a_file_in_memory_does(
    steps: list[tuple[int, int, int]], where: str
) -> None:
    """Against `io.BytesIO`, over a staged block and a stored one."""
    data = payloads.payload(200_000, 3)
    model = io.BytesIO(data)
    store = open_controlled()
    with staged(store) as tier:
        tier.pause()
        receipt = tier.write_block("k", data)
        if where == "stored":
            tier.resume()
            receipt.wait(timeout=LONG_S)
        with tier.open("k", "rb") as reader:
            for offset, whence, size in steps:
                at = absolute(model, offset, whence)
                if at >= 0:
                    assert reader.seek(offset, whence) == model.seek(at)
                assert reader.read(size) == model.read(size)
                assert reader.tell() == model.tell()


def test_a_reader_keeps_room_and_nobody_waits_for_it(tier: kvio.StagingTier) -> None:
    """A write that fits only without the reader passes through."""
    tier.pause()
    tier.write_block("k", bytes(40_960))
    readers = [tier.open("k", "rb"), tier.open("k", "rb")]
    tier.resume()
    tier.barrier(timeout=LONG_S)
    used = [tier.stats().used_bytes]
    through = tier.write_block("large", bytes(40_960))
    for reader in readers:
        reader.close()
        used.append(tier.stats().used_bytes)

    assert used == [40_960, 40_960, 0]
    assert through.done


def test_a_detached_block_keeps_its_bytes(tier: kvio.StagingTier) -> None:
    """Whoever has it may read on when the buffer around it is gone."""
    tier.pause()
    tier.write_block("k", b"a" * 40_960)
    reader = tier.open("k", "rb")
    raw = reader.detach()
    del reader
    gc.collect()
    returned(tier)
    tier.resume()
    tier.barrier(timeout=LONG_S)
    used = tier.stats().used_bytes

    assert used == 40_960
    assert raw.read() == b"a" * 40_960
    raw.close()
    assert tier.stats().used_bytes == 0


def test_a_dropped_reader_gives_its_room_back(tier: kvio.StagingTier) -> None:
    """Without a call of close."""
    tier.pause()
    tier.write_block("k", bytes(40_960))
    reader = tier.open("k", "rb")
    assert reader.read(3) == bytes(3)
    tier.resume()
    tier.barrier(timeout=LONG_S)
    del reader
    gc.collect()
    returned(tier)

    assert tier.stats().used_bytes == 0


# Rot


def in_pieces(reader: kvio.StagedReader, step: int) -> bytes:
    """Read to the end, so much at a time."""
    return b"".join(iter(lambda: reader.read(step), b""))


def in_lines(reader: kvio.StagedReader) -> bytes:
    """Read to the end by lines."""
    return b"".join(reader)


def into_memory(reader: kvio.StagedReader) -> bytes:
    """Read to the end into memory of ours, in pieces that fit no buffer."""
    out = memoryview(bytearray(reader.nbytes))
    at = 0
    while at < reader.nbytes:
        at += reader.readinto(out[at : at + 700_001])
    return bytes(out)


def after_a_look(reader: kvio.StagedReader) -> bytes:
    """Look at both ends first, as readers of many formats do."""
    reader.read(16)
    reader.seek(-16, io.SEEK_END)
    reader.read()
    reader.seek(0)
    return reader.read()


WAYS: dict[str, Callable[[kvio.StagedReader], bytes]] = {
    "at once": lambda reader: reader.read(),
    "in small pieces": lambda reader: in_pieces(reader, 10_007),
    "in large pieces": lambda reader: in_pieces(reader, 1_300_003),
    "into memory": into_memory,
    "by lines": in_lines,
    "after a check": after_a_look,
    "without a buffer": lambda reader: reader.raw.readall(),
}
DATA = payloads.payload(2 * kvio.MiB + 77, 9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [0, kvio.MiB, len(DATA) - 1])
def test_a_stored_block_that_rotted_is_not_read_to_its_end(
    tmp_path: Path, way: str, at: int
) -> None:
    """Who reads it in order gets an error instead of its last bytes, again and again."""
    with kvio.open_store("posix-tmpfile", root=tmp_path) as store, kvio.stage(store) as tier:
        store.write_block("k", DATA)
        with tier.open("k", "rb") as reader:
            assert WAYS[way](reader) == DATA
        path = faultlab.file_of(tmp_path, "k")
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([DATA[at] ^ 1]))

        with tier.open("k", "rb") as reader:
            with pytest.raises(kvio.CorruptBlockError, match="checksum") as caught:
                WAYS[way](reader)
            assert caught.value.key == "k"
        with tier.open("k", "rb") as reader:
            for _ in range(2):
                reader.seek(0)
                with pytest.raises(kvio.CorruptBlockError):
                    reader.read()


def test_only_what_is_read_in_order_is_checked_as_a_whole(tmp_path: Path) -> None:
    """Ranges are delivered as they lie there; a block without a checksum is, too."""
    rotten = bytes([DATA[0] ^ 1]) + DATA[1:]
    with (
        kvio.open_store("posix-tmpfile", root=tmp_path, options={"checksum": "none"}) as bare,
        kvio.open_store("posix-tmpfile", root=tmp_path) as store,
        kvio.stage(store) as tier,
    ):
        for key, writer in (("bare", bare), ("k", store)):
            writer.write_block(key, DATA)
            path = faultlab.file_of(tmp_path, key)
            path.chmod(0o600)
            with path.open("r+b") as file:
                file.write(rotten[:1])
        with tier.open("k", "rb") as reader:
            reader.seek(kvio.MiB)
            back = reader.read()
            reader.seek(0)
            front = reader.read(kvio.MiB)
        with tier.open("bare", "rb") as reader:
            whole = reader.read()

    assert (front + back, whole) == (rotten, rotten)


def test_all_that_is_left_is_asked_for_at_once(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """``read()`` without a size is one request, however long the block."""
    store.write_block("k", DATA)
    before = store.stats().reads
    with tier.open("k", "rb") as reader:
        assert reader.read() == DATA

    assert store.stats().reads == before + 1
