"""Files on a tier without room for them: they spill or fail, and nobody waits for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from tests.posix import faultlab
from tests.staging.controlled import LONG_S, ControlledBackend, disk_error, open_controlled, staged
from tests.staging.engines import local
from tests.staging.files import CAPACITY, start_and_wait


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


# No room


def test_two_files_that_need_more_than_half_of_the_tier_both_end(
    spilling: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """By turns in one thread, so that nobody but the other file could ever make room."""
    a, b = payloads.payload(48_000, 1), payloads.payload(48_000, 2)
    first, second = spilling.open("a", "wb"), spilling.open("b", "wb")
    for at in range(0, 48_000, 6_000):
        first.write(a[at : at + 6_000])
        second.write(b[at : at + 6_000])
        assert spilling.stats().used_bytes <= CAPACITY
    spilled = [first.spilled, second.spilled]
    first.close()
    second.close()
    spilling.barrier(timeout=LONG_S)

    assert sorted(spilled) == [False, True]
    assert store.wrapper.peek("a") == a
    assert store.wrapper.peek("b") == b


def test_without_a_spool_the_second_is_reported_which_option_it_lacks(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """It does not wait for the other; after that it cannot be published in part."""
    first, second = tier.open("a", "wb"), tier.open("b", "wb")
    first.write(bytes(40_960))
    with pytest.raises(kvio.StorageFullError, match="spool="):
        second.write(bytes(40_960))
    with pytest.raises(kvio.StorageError, match="nothing is published"):
        second.write(b"more")
    with pytest.raises(kvio.StorageError, match="nothing is published"):
        second.close()
    first.close()
    tier.barrier(timeout=LONG_S)

    assert second.receipt is None
    assert store.wrapper.order("stored") == ["a"]
    assert tier.stats().used_bytes == 0


def test_many_threads_with_files_that_do_not_fit_together_all_end(
    spilling: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Each holds room and wants more; plain writers stand between them."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(3):
                with spilling.open(f"f{number}", "wb") as file:
                    for _ in range(6):
                        file.write(bytes([number]) * 8192)
                spilling.write_block(f"w{number}", bytes([turn]) * 30_000)
        except BaseException as exc:  # noqa: BLE001  # reported below
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    spilling.barrier(timeout=LONG_S)

    assert errors == []
    for number in range(4):
        assert store.wrapper.peek(f"f{number}") == bytes([number]) * 6 * 8192
        assert store.wrapper.peek(f"w{number}") == bytes([2]) * 30_000
    assert spilling.stats().used_bytes == 0


def test_a_write_beside_an_open_file_never_waits_for_it(tier: kvio.StagingTier) -> None:
    """One thread may have both in hand: what does not fit beside the file passes through."""
    file = tier.open("file", "wb")
    file.write(bytes(40_960))
    receipt = tier.write_block("large", bytes(30_000))
    small = tier.write_block("small", bytes(8_000))
    file.close()

    assert receipt.done
    assert tier.stats().passed_through == 1
    assert small.wait(timeout=LONG_S).nbytes == 8_000
    assert bytes(tier.read_block("file")) == bytes(40_960)


def test_those_who_wait_are_reported_when_a_file_takes_what_they_wait_for(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """A writer that waited for a drain, and now could only wait for a reader, passes through."""
    store.wrapper.hold("slow")
    tier.write_block("slow", bytes(16_384))
    store.wrapper.wait_for("begin", "slow")
    waiting: list[kvio.StagedReceipt] = []
    thread = threading.Thread(
        target=lambda: waiting.append(tier.write_block("all", bytes(CAPACITY)))
    )
    start_and_wait(tier, thread)
    reader = tier.open("slow", "rb")
    thread.join(LONG_S)

    assert waiting[0].done
    assert tier.stats().passed_through == 1
    store.wrapper.let_go()
    reader.close()


def test_a_file_waits_for_what_drains_will_free(
    spilling: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """It spills only what would otherwise depend on other files."""
    store.wrapper.hold("slow")
    spilling.write_block("slow", bytes(40_960))
    store.wrapper.wait_for("begin", "slow")
    file = spilling.open("k", "wb")
    thread = threading.Thread(target=lambda: file.write(bytes(40_960)))
    start_and_wait(spilling, thread)
    store.wrapper.let_go()
    thread.join(LONG_S)
    file.close()

    assert not file.spilled
    assert bytes(spilling.read_block("k")) == bytes(40_960)


def test_a_file_that_waits_too_long_fails(
    store: WrappedStore[ControlledBackend], tmp_path: Path
) -> None:
    """With `StorageTimeoutError`, and then it publishes nothing."""
    with staged(store, CAPACITY, spool=tmp_path) as tier:
        store.wrapper.hold("slow")
        tier.write_block("slow", bytes(CAPACITY))
        file = tier.open("k", "wb", timeout=0.01)
        with pytest.raises(kvio.StorageTimeoutError):
            file.write(bytes(40_960))
        with pytest.raises(kvio.StorageError, match="nothing is published"):
            file.close()
        store.wrapper.let_go()
        tier.barrier(timeout=LONG_S)

        assert not tier.contains("k")
        assert tier.stats().used_bytes == 0


@pytest.mark.parametrize("when_full", ["raise", "pass_through"])
def test_a_file_on_a_full_tier_spills_at_once_where_nobody_waits(
    store: WrappedStore[ControlledBackend], tmp_path: Path, when_full: str
) -> None:
    """Nothing waits for drains under ``when_full="raise"`` and ``"pass_through"``."""
    with staged(store, CAPACITY, spool=tmp_path, when_full=when_full) as tier:
        store.wrapper.hold("slow")
        slow = tier.write_block("slow", bytes(CAPACITY))
        file = tier.open("k", "wb")
        file.write(b"y" * 40_960)
        spilled = file.spilled
        store.wrapper.let_go()
        slow.wait(timeout=LONG_S)
        file.close()

        assert spilled
        assert bytes(tier.read_block("k")) == b"y" * 40_960


def test_failed_blocks_make_a_file_spill(
    store: WrappedStore[ControlledBackend], spilling: kvio.StagingTier
) -> None:
    """Room that only a decision of somebody frees is not waited for."""
    store.wrapper.fail("bad", disk_error("bad"), times=9)
    with pytest.raises(kvio.StorageError):
        spilling.write_block("bad", bytes(40_960)).wait(timeout=LONG_S)
    with spilling.open("k", "wb") as file:
        file.write(bytes(40_960))
        spilled = file.spilled
        spilling.discard(spilling.failed[0])

    assert spilled
    assert bytes(spilling.read_block("k")) == bytes(40_960)


def test_a_file_larger_than_the_tier_goes_through_it(
    spilling: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Its receipt is done at close, and it follows what was staged before it."""
    spilling.write_block("k", b"older")
    data = bytearray(payloads.payload(300_000, 7))
    with spilling.open("k", "wb") as file:
        for at in range(0, 300_000, 25_000):
            file.write(data[at : at + 25_000])
            assert spilling.stats().used_bytes <= CAPACITY
        file.seek(100)
        file.write(b"patched")
    data[100:107] = b"patched"

    assert file.receipt is not None
    assert file.receipt.done
    assert store.wrapper.peek("k") == bytes(data)
    assert spilling.stats().used_bytes == 0
    assert spilling.stats().passed_through == 1


@pytest.mark.slow
def test_memory_stays_bounded_however_long_a_file_is(tmp_path: Path) -> None:
    """A file of sixteen times the tier adds less than a tier and a window to private memory."""
    (tmp_path / "spool").mkdir()
    (tmp_path / "blocks").mkdir()
    chunk = payloads.payload(kvio.MiB, 5)
    with (
        kvio.open_store("posix-tmpfile", root=tmp_path / "blocks") as store,
        kvio.stage(store, "8MiB", spool=tmp_path / "spool", huge_pages=False) as tier,
    ):
        with tier.open("warm", "wb") as file:
            file.write(chunk * 2)
        before, most = _private_bytes(), 0
        with tier.open("k", "wb") as file:
            for _ in range(128):
                file.write(chunk)
                most = max(most, _private_bytes())
        most = max(most, _private_bytes())

        assert most - before < 24 * kvio.MiB
        assert tier.stat_block("k").nbytes == 128 * kvio.MiB


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def test_what_is_spilled_has_no_name_and_leaves_nothing(
    spilling: kvio.StagingTier, tmp_path: Path
) -> None:
    """Nobody else can open it, and its descriptor goes with the file."""
    before = len(faultlab.open_descriptors())
    file = spilling.open("k", "wb")
    file.write(bytes(100_000))
    spool = file._spool
    assert spool is not None
    names = os.listdir(tmp_path)
    mode = os.fstat(spool._file.fileno()).st_mode & 0o777
    file.abort()

    assert names == []
    assert mode == 0o600
    assert len(faultlab.open_descriptors()) == before
    assert spilling.stats().used_bytes == 0


def test_a_spool_that_fails_fails_the_file(
    store: WrappedStore[ControlledBackend], tmp_path: Path
) -> None:
    """Its directory went away: the write says so, and the room is given back."""
    spool = tmp_path / "spool"
    spool.mkdir()
    with staged(store, CAPACITY, spool=spool) as tier:
        spool.rmdir()
        with pytest.raises(kvio.StorageError, match="spill"), tier.open("k", "wb") as file:
            file.write(bytes(100_000))

        assert tier.stats().used_bytes == 0
        assert not tier.contains("k")
    with pytest.raises(kvio.ConfigError, match="spool="):
        kvio.stage(store, CAPACITY, spool=spool)


def test_a_copy_that_fails_gives_its_room_back(
    tier: kvio.StagingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a device may; the write says so, and what was staged before goes too."""
    file = tier.open("k", "wb")
    file.write(bytes(20_000))

    def fail(*_: object, **__: object) -> None:
        raise kvio.StorageError("copy to device: lost")

    monkeypatch.setattr(local(tier).memory, "fill", fail)
    with pytest.raises(kvio.StorageError, match="lost"), file:
        file.write(bytes(20_000))

    assert tier.stats().used_bytes == local(tier).ledger.allocator.open_bytes == 0
    assert not tier.contains("k")


def test_memory_can_be_taken_back_while_a_file_is_open(spilling: kvio.StagingTier) -> None:
    """`shrink` is served by the files that spill, and no writer waits for what cannot be."""
    file = spilling.open("k", "wb")
    file.write(b"a" * 40_960)
    spilling.shrink(CAPACITY // 2)
    spilling.write_block("other", bytes(20_000))
    file.write(b"b" * 8_192)
    capacity = spilling.stats().capacity_bytes
    file.close()
    spilling.barrier(timeout=LONG_S)

    assert file.receipt is not None
    assert capacity == CAPACITY // 2
    assert bytes(spilling.read_block("k")) == b"a" * 40_960 + b"b" * 8_192


def test_files_of_a_closed_tier_fail(store: WrappedStore[ControlledBackend]) -> None:
    """None of them is published, and none goes on."""
    with staged(store, CAPACITY) as tier:
        small, large = tier.open("small", "wb"), tier.open("large", "wb")
        small.write(b"few")
        large.write(bytes(20_000))
        tier.write_block("read", bytes(20_000))
        reader = tier.open("read", "rb")
        tier.close(timeout=LONG_S)

        for file in (small, large):
            with pytest.raises(kvio.StoreClosedError):
                file.close()
            assert file.receipt is None
        with pytest.raises(kvio.StoreClosedError):
            tier.open("k", "wb")
        with pytest.raises(kvio.StoreClosedError):
            reader.read()
        reader.close()
        assert store.wrapper.order("stored") == ["read"]


def test_a_staged_file_of_a_closed_tier_gives_its_room_back(
    store: WrappedStore[ControlledBackend],
) -> None:
    """All of it was staged, with nothing left to write: it is refused all the same."""
    with staged(store, CAPACITY) as tier:
        file = tier.open("k", "wb")
        file.write(bytes(CAPACITY // 4))
        before = tier.stats().used_bytes
        tier.close(timeout=LONG_S)
        with pytest.raises(kvio.StoreClosedError, match="tier is closed"):
            file.close()

        assert before == CAPACITY // 4
        assert tier.stats().used_bytes == 0
        assert file.receipt is None
        assert store.wrapper.order("stored") == []
