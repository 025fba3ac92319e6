"""A block that a store found corrupt is healed by the next write of it, wherever that goes."""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvio
from kvio.core.damage import MAX_KEYS, DamagedKeys
from kvio.types import BlockStatus as Status
from tests.posix import children, faultlab, mounts
from tests.staging.daemon.daemons import serving

KEY = "block"
DATA = faultlab.pattern(1, 30_000)
#: As long, with other bytes.
OTHER = faultlab.pattern(2, 30_000)
LONG_S = 60.0


@pytest.fixture
def root(disk_path: Path) -> Path:
    """A root directory of our own."""
    path = disk_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def store(root: Path) -> Iterator[kvio.Store]:
    """A store of files."""
    with kvio.open_store("hybrid", root=root) as opened:
        yield opened


def rot(root: Path, key: str = KEY) -> None:
    """Flip a bit of a block's payload, of which its length and its trailer show nothing."""
    faultlab.rot(root, key)


def found(store: kvio.Store | kvio.StagingTier, key: str = KEY) -> None:
    """Let a store find that a block is corrupt."""
    with pytest.raises(kvio.CorruptBlockError):
        store.read_block(key)


def test_a_cache_that_recomputes_heals(store: kvio.Store, root: Path) -> None:
    """After one pass of read, else recompute and write, everything is read, whatever rotted."""
    blocks = {f"kv/{i}": faultlab.pattern(i, 5000) for i in range(200)}
    store.write_blocks(blocks.items())
    for key in random.Random(1).sample(sorted(blocks), 70):
        rot(root, key)
    recomputed = 0
    for key, data in blocks.items():
        try:
            store.read_block(key)
        except kvio.CorruptBlockError:
            store.write_block(key, data)
            recomputed += 1

    assert recomputed == 70
    assert all(store.read_block(key) == data for key, data in blocks.items())


def test_memory_heals() -> None:
    """Blocks in memory are verified, and healed as those on a disk are."""
    with kvio.open_store("memory") as store:
        store.write_block(KEY, DATA)
        block = store._backend._blocks[KEY]  # type: ignore[attr-defined]
        object.__setattr__(block, "data", b"\0" + block.data[1:])

        assert store.verify_block(KEY).status is Status.CORRUPT
        assert not store.write_block(KEY, DATA).existed
        assert store.verify_block(KEY).ok
        assert store.read_block(KEY) == DATA


@pytest.mark.parametrize("verify", ["length", "off"])
def test_what_reads_do_not_check_is_healed_where_a_check_found_it(root: Path, verify: str) -> None:
    """`verify_block` checks all whatever reads do, and what it found is not kept."""
    with kvio.open_store("hybrid", root=root, options={"verify": verify}) as store:
        store.write_block(KEY, DATA)
        rot(root)

        assert store.verify_block(KEY).status is Status.CORRUPT
        assert store.read_block(KEY) != DATA
        assert not store.write_block(KEY, DATA).existed
        assert store.read_block(KEY) == DATA


def test_tasks_heal(store: kvio.Store, root: Path) -> None:
    """What a task found corrupt, by a read or a batch, a task's write or batch heals."""

    async def play() -> None:
        tasks = kvio.AsyncStore(store)
        for batch_reads, batch_writes in ((0, 0), (0, 1), (1, 0), (1, 1)):
            await tasks.write_block(KEY, DATA, if_exists="replace")
            rot(root)
            if batch_reads:
                [read] = await tasks.read_blocks_into([(KEY, bytearray(len(DATA)))])
                assert read.status is Status.CORRUPT
            else:
                with pytest.raises(kvio.CorruptBlockError):
                    await tasks.read_block_into(KEY, bytearray(len(DATA)))
            if batch_writes:
                [written] = await tasks.write_blocks([(KEY, DATA)])
                assert written.status is Status.OK
            else:
                assert not (await tasks.write_block(KEY, DATA)).existed
            assert await tasks.read_block(KEY) == DATA

    asyncio.run(play())


def test_error_and_replace_mean_what_they_say(store: kvio.Store, root: Path) -> None:
    """A key that was found corrupt is still taken for ``error``; ``replace`` needs no check."""
    store.write_block(KEY, DATA)
    rot(root)
    found(store)
    with pytest.raises(kvio.BlockExistsError):
        store.write_block(KEY, DATA, if_exists="error")

    assert not store.write_block(KEY, DATA, if_exists="replace").existed
    assert store.write_block(KEY, OTHER).existed


def test_a_deleted_block_is_written_as_any_other(store: kvio.Store, root: Path) -> None:
    """A key whose damaged block was removed is free."""
    store.write_block(KEY, DATA)
    rot(root)
    found(store)
    store.delete_block(KEY)

    assert not store.write_block(KEY, DATA).existed
    assert store.write_block(KEY, OTHER).existed


def test_a_block_of_another_length_is_replaced(store: kvio.Store, root: Path) -> None:
    """As ``keep`` does with an intact one; nothing longer than the write is read for it."""
    store.write_block(KEY, DATA)
    for nbytes in (10, 50_000):
        rot(root)
        found(store)
        data = faultlab.pattern(nbytes, nbytes)

        assert not store.write_block(KEY, data).existed
        assert store.read_block(KEY) == data


def test_a_child_knows_what_its_parent_found(store: kvio.Store, root: Path) -> None:
    """A forked child heals what was found corrupt before the fork."""
    store.write_block(KEY, DATA)
    rot(root)
    found(store)

    assert children.in_child(lambda: str(store.write_block(KEY, DATA).existed)) == "False"
    assert store.read_block(KEY) == DATA


def test_a_pickled_store_begins_anew(store: kvio.Store, root: Path) -> None:
    """What a store found is its own process's: a copy is as one that was just opened."""
    store.write_block(KEY, DATA)
    rot(root)
    found(store)

    with pickle.loads(pickle.dumps(store)) as copy:
        assert copy.write_block(KEY, DATA).existed
    assert not store.write_block(KEY, DATA).existed


def test_the_memory_of_keys_is_bounded() -> None:
    """Of too many keys the oldest are forgotten; finding a key again makes it the newest."""
    damaged = DamagedKeys()
    for number in range(MAX_KEYS):
        damaged.note(str(number))
    damaged.note("0")
    damaged.note("one more")

    assert len(damaged.keys) == MAX_KEYS
    assert "1" not in damaged.keys
    assert {"0", "2", "one more"} <= set(damaged.keys)


def test_threads_note_and_forget_at_once() -> None:
    """Noting and forgetting from many threads raises nothing and stays within the bound."""
    damaged = DamagedKeys()

    def work(number: int) -> int:
        most = 0
        for turn in range(3000):
            damaged.note(f"{number}/{turn}")
            most = max(most, len(damaged.keys))
            if turn % 2:
                damaged.forget(f"{number}/{turn}")
        return most

    with ThreadPoolExecutor(4) as pool:
        most = max(pool.map(work, range(4)))

    assert most <= MAX_KEYS + 1  # a key that is noted is there before the oldest goes
    assert len(damaged.keys) <= MAX_KEYS


# Through a tier


def test_a_tier_heals_what_was_read_through_it(store: kvio.Store, root: Path) -> None:
    """A ``keep`` write, alone or in a batch, drains over what a read of the tier found corrupt."""
    keys = [f"k{i}" for i in range(5)]
    with kvio.stage(store, "1MiB") as tier:
        for batch in (False, True):
            store.write_blocks([(key, DATA) for key in keys], if_exists="replace")
            for key in keys[1:]:
                rot(root, key)
                found(tier, key)
            tier.pause()
            if batch:
                tier.write_blocks([(key, DATA) for key in keys], if_exists="keep")
            else:
                for key in keys:
                    tier.write_block(key, DATA, if_exists="keep")
            tier.resume()
            tier.barrier(timeout=LONG_S)

            assert all(store.read_block(key) == DATA for key in keys)


def test_what_a_tier_writes_through_heals(store: kvio.Store, root: Path) -> None:
    """So does a block that is larger than the tier."""
    store.write_block(KEY, DATA)
    rot(root)
    with kvio.stage(store, "8KiB") as tier:
        found(tier)
        tier.write_block(KEY, DATA, if_exists="keep")
        tier.barrier(timeout=LONG_S)

    assert store.read_block(KEY) == DATA


def test_what_a_file_of_a_tier_found_is_healed(store: kvio.Store, root: Path) -> None:
    """Read in ranges, of which a store checks no payload, the end of a file finds it."""
    store.write_block(KEY, DATA)
    rot(root)
    with kvio.stage(store, "1MiB") as tier:
        with tier.open(KEY, "rb") as file, pytest.raises(kvio.CorruptBlockError):
            file.read()
        with tier.open(KEY, "wb", if_exists="keep") as copy:
            copy.write(DATA)
        tier.barrier(timeout=LONG_S)

        assert tier.read_block(KEY) == DATA


def test_what_a_tier_verified_is_healed(store: kvio.Store, root: Path) -> None:
    """A receipt that does not verify is made good by staging its bytes again."""
    with kvio.stage(store, "1MiB") as tier:
        receipt = tier.write_block(KEY, DATA)
        tier.barrier(timeout=LONG_S)
        rot(root)
        with pytest.raises(kvio.CorruptBlockError):
            tier.verify(receipt)
        again = tier.write_block(KEY, DATA, if_exists="keep")
        tier.verify(again, timeout=LONG_S)


def test_a_daemon_heals_what_its_client_found(store: kvio.Store, root: Path) -> None:
    """The process that reads is not the one that drains, and still no damage is kept."""
    with (
        kvio.open_store("hybrid", root=root) as theirs,
        serving(theirs) as daemon,
        kvio.stage(store, daemon=daemon.path) as tier,
    ):
        for nbytes in (30_000, 3 << 20):  # staged, and written past the tier
            data = faultlab.pattern(3, nbytes)
            store.write_block(KEY, data, if_exists="replace")
            rot(root)
            found(tier)
            tier.write_block(KEY, data, if_exists="keep")
            tier.barrier(timeout=LONG_S)

            assert store.read_block(KEY) == data
            assert not store._damaged.keys


# Where the damage is


@pytest.mark.root
@pytest.mark.slow
def test_damage_in_the_page_cache_alone_is_healed(disk_path: Path) -> None:
    """Where a check past the page cache finds a block intact, readers of the cache still do not."""
    image = disk_path / "ext4.img"
    rotten = bytes([DATA[0] ^ 1]) + DATA[1:]
    with (
        mounts.loop_filesystem("ext4", disk_path) as root,
        kvio.open_store("hybrid", root=root) as store,
    ):
        if not store.capabilities.direct_io:
            pytest.skip("no direct I/O here: every check is through the page cache")
        store.write_block(KEY, DATA)
        path = faultlab.file_of(root, KEY)
        drop_from_cache(path, 0)
        flip_on_the_disk(image, DATA)
        found(store)
        flip_on_the_disk(image, rotten)
        drop_from_cache(path, 4096)  # of a block that is not all there, checks ask the disk
        assert store.verify_block(KEY).ok, "the disk has it intact"
        found(store)
        drop_from_cache(path, 4096)

        assert not store.write_block(KEY, DATA).existed
        assert store.read_block(KEY) == DATA


def drop_from_cache(path: Path, start: int) -> None:
    """Write a file back and drop its pages from a byte on."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, start, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def flip_on_the_disk(image: Path, there: bytes) -> None:
    """Flip the first bit of what lies on a loop device, behind its file system's back."""
    with image.open("r+b") as file, mmap.mmap(file.fileno(), 0) as disk:
        at = disk.find(there)
        assert at >= 0
        disk[at] ^= 1
        disk.flush()
