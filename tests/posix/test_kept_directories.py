"""Descriptors: what stores keep open stays within a part of the limit, and is given back."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import pytest

import kvio
from kvio._native import faults, ffi, lib
from kvio.backends.posix.directories import KeptDirectory
from kvio.core import lifetime
from kvio.filesystem.descriptors import SHARED
from kvio.url import OptionValue
from tests.posix import children, faultlab
from tests.posix.gate import SlowFile

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CREATE: Final[dict[str, OptionValue]] = {"create": True}
LARGE: Final = 512 << 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def limit_descriptors(soft: int) -> None:
    """Let this process open so many."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def alone(work: Callable[[], str | None] | Callable[[], None]) -> str:
    """Run *work* in a forked child without what earlier tests may have left open."""

    def run() -> str | None:
        for other in tuple(lifetime._STORES):
            cast(kvio.Store, other).close()
        return work()

    return children.in_child(run, inherits=False)


def data_of(key: str, nbytes: int = 1000) -> bytes:
    """Make the bytes of a key, which no other key has."""
    return hashlib.blake2b(key.encode()).digest() * (nbytes // 64 + 1)


def misplaced(root: Path) -> list[str]:
    """Name the blocks that do not lie where their keys say, or have another's bytes."""
    wrong = []
    for path in root.rglob("*"):
        if not path.is_file() or path.name.startswith("."):
            continue
        key = path.name.replace("~", "/")
        content = path.read_bytes()
        if path != faultlab.file_of(root, key):
            wrong.append(f"{key} lies in {path.parent.relative_to(root)}")
        elif faultlab.unseal(content, key)[:64] != data_of(key)[:64]:
            wrong.append(f"{key} has the bytes of another key")
    return wrong


def evict_all() -> None:
    """Close every directory that may be closed."""
    while before := len(SHARED._kept):
        SHARED.give_back()
        if len(SHARED._kept) == before:
            return


def calls(fault: Any, site: str) -> int:
    """How often a call was made."""
    return int(fault.seen[faults.sites()[site]])


def open_or_skip(root: Path, **options: Any) -> kvio.Store:
    """Open a store; skip where the file system cannot keep what it promises."""
    try:
        return kvio.open_store("posix-tmpfile", root=root, options=CREATE, **options)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")


# Many stores


def use_all(stores: Sequence[kvio.Store], number: int) -> None:
    """Write to and read from every store, block by block and in batches."""
    for at, store in enumerate(stores):
        for i in range(3):
            key = f"t{number}/{at}/{i}"
            store.write_block(key, data_of(key))
            assert bytes(store.read_block(key)) == data_of(key)
        keys = [f"b{number}/{at}/{i}" for i in range(20)]
        results = store.write_blocks([(key, data_of(key)) for key in keys])
        assert not [result.error for result in results if not result.ok]
        rooms = [(key, bytearray(len(data_of(key)))) for key in keys]
        results = store.read_blocks_into(rooms)
        assert not [result.error for result in results if not result.ok]
        assert all(bytes(room) == data_of(key) for key, room in rooms)


def use_many_stores(parent: Path, count: int, threads: int, **options: Any) -> str:
    """Open stores under *parent* and use all of them from several threads at once."""
    stores: list[kvio.Store] = []
    try:
        for number in range(count):
            root = parent / str(number)
            stores.append(kvio.open_store("posix-tmpfile", root=root, options=CREATE, **options))
    except kvio.UnsupportedError as exc:
        return str(exc)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(partial(use_all, stores), range(threads)))
    for store in stores:
        store.close()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("durability", ["visible", "durable"])
def test_a_hundred_stores_work_with_256_descriptors(
    disk_path: Path, durability: str, threads: int
) -> None:
    """Every one of them is written to and read from, from several threads at once as well."""
    count = 100 if durability == "visible" else 24  # a durable one makes all its directories

    def work() -> str:
        limit_descriptors(256 if count == 100 else 80)
        return use_many_stores(disk_path, count, threads, durability=durability, io_threads=2)

    said = alone(work)
    if said:
        pytest.skip(said)
    for number in range(count):
        assert misplaced(disk_path / str(number)) == []


def test_stores_keep_at_most_half_of_the_limit(tmp_path: Path) -> None:
    """However many directories stores have: half is left to the rest of the process."""

    def work() -> None:
        limit_descriptors(200)
        stores = [
            kvio.open_store("posix-tmpfile", root=tmp_path / str(n), options=CREATE)
            for n in range(5)
        ]
        before = len(faultlab.open_descriptors()) - len(stores)
        for store in stores:
            store.write_blocks([(f"k{i}", b"data") for i in range(300)])
            for i in range(300):
                store.write_block(f"s{i}", b"data")
        assert 90 <= len(faultlab.open_descriptors()) - before <= 100
        limit_descriptors(120)
        for i in range(300):
            stores[0].write_block(f"l{i}", b"data")
        assert len(faultlab.open_descriptors()) - before <= 60
        limit_descriptors(1000)
        for i in range(600):
            stores[0].write_block(f"m{i}", b"data")
        kept = len(faultlab.engine_of(stores[0]).directories.kept)
        assert kept >= 200, "the limit was raised, and few directories are kept"

    alone(work)


def test_an_idle_store_makes_room_for_a_busy_one(tmp_path: Path) -> None:
    """What was used longest ago is closed first, whichever store it is of."""

    def work() -> None:
        limit_descriptors(128)
        idle, busy = (
            kvio.open_store("posix-tmpfile", root=tmp_path / name, options=CREATE)
            for name in ("idle", "busy")
        )
        idle.write_blocks([(f"k{i}", b"data") for i in range(300)])
        assert len(faultlab.engine_of(idle).directories.kept) > 50
        for i in range(300):
            busy.write_block(f"k{i}", b"data")
        assert len(faultlab.engine_of(idle).directories.kept) == 0
        assert len(faultlab.engine_of(busy).directories.kept) > 50
        assert bytes(idle.read_block("k7")) == b"data"

    alone(work)


# Large batches


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("soft", [24, 40])
def test_a_batch_over_all_directories_needs_few_descriptors(
    root: Path, soft: int, layout: Literal["block", "plain"]
) -> None:
    """Four thousand blocks in 256 directories are written, found, read and deleted."""
    keys = [f"d{i % 256}/k{i}" for i in range(4000)]

    def work() -> None:
        limit_descriptors(soft)
        with kvio.open_store("posix-tmpfile", root=root, layout=layout, io_threads=1) as store:
            results = store.write_blocks([(key, data_of(key)) for key in keys])
            assert not [result.error for result in results if not result.ok]
            rooms = [(key, bytearray(len(data_of(key)))) for key in keys]
            assert all(result.ok for result in store.read_blocks_into(rooms))
            assert all(bytes(room) == data_of(key) for key, room in rooms)
            assert store.count_leading(keys) == len(keys)
            assert store.count_leading([*keys[:700], "none", *keys]) == 700
            assert sorted(store.list_keys()) == sorted(keys)
            assert store.sweep() == []
            assert all(result.ok for result in store.delete_blocks(keys[:300]))
            rooms = [(key, bytearray(len(data_of(key)))) for key in keys[:600]]
            missing = [r.status == "missing" for r in store.read_blocks_into(rooms)]
            assert missing == [True] * 300 + [False] * 300

    alone(work)
    if layout == "block":
        assert misplaced(root) == []
    assert all(faultlab.peek(root, key, layout=layout) == data_of(key) for key in keys[300::97])


def test_a_durable_batch_goes_on_with_fewer_files_at_once(disk_path: Path) -> None:
    """With a dozen descriptors left no block fails, and few are begun in vain."""

    def work() -> None:
        limit_descriptors(700)
        with open_or_skip(disk_path / "root", durability="durable", io_threads=1) as store:
            with faultlab.free_descriptors(12), faults.inject("read", nth=1 << 30) as fault:
                results = store.write_blocks([(f"k{i}", data_of(f"k{i}")) for i in range(200)])
            assert not [result.error for result in results if not result.ok]
            assert calls(fault, "open_read") < 220
            assert len(SHARED._kept) == 256, "directories were given back where none had to be"

    alone(work)
    assert faultlab.peek(disk_path / "root", "k199") == data_of("k199")


def test_durable_batches_leave_descriptors_to_others(disk_path: Path) -> None:
    """While six threads write durable batches, the rest of the process can open files."""

    def work() -> None:
        how: dict[str, Any] = {"durability": "durable", "layout": "plain", "io_threads": 1}
        with open_or_skip(disk_path / "root", **how) as store:
            limit_descriptors(4 * len(faultlab.open_descriptors()) + 200)
            ended = threading.Event()

            def write(number: int) -> None:
                items = [(f"t{number}-{i}", b"data") for i in range(200)]
                results = store.write_blocks(items)
                assert not [result.error for result in results if not result.ok]

            def open_files() -> None:
                while not ended.is_set():
                    os.close(os.open("/dev/null", os.O_RDONLY))

            with ThreadPoolExecutor(7) as pool:
                other = pool.submit(open_files)
                writers = [pool.submit(write, number) for number in range(6)]
                for writer in writers:
                    writer.exception()
                ended.set()
                for one in (*writers, other):
                    one.result()

    alone(work)


# What runs out all the same


def test_a_process_without_descriptors_gets_those_of_directories(tmp_path: Path) -> None:
    """Each verb works while the rest of the process has taken every other descriptor."""

    def work() -> None:
        limit_descriptors(256)
        with kvio.open_store("posix-tmpfile", root=tmp_path / "a", options=CREATE) as store:
            keys = [f"k{i}" for i in range(300)]
            file = kvio.SharedFile.create(tmp_path / "f", 4096, durability="visible")
            file.pwrite(bytes(4096), 0)
            verbs: dict[str, Callable[[], object]] = {
                "write": lambda: store.write_block("new", b"data"),
                "read": lambda: bytes(store.read_block("k7")),
                "batch": lambda: [r.error for r in store.write_blocks([("b", b"1"), ("c", b"2")])],
                "stat": lambda: store.stat_block("k8"),
                "verify": lambda: store.verify_block("k9").error,
                "list": lambda: len(list(store.list_keys())),
                "sweep": lambda: store.sweep(),
                "delete": lambda: store.delete_block("k1"),
                "open": lambda: kvio.open_store(
                    "posix-tmpfile", root=tmp_path / "b", options=CREATE
                ).close(),
                "join": lambda: file.seal(),
            }
            for name, verb in verbs.items():
                store.write_blocks([(key, b"data") for key in keys])
                assert SHARED._kept
                with faultlab.free_descriptors(0):
                    said = verb()
                assert not isinstance(said, list) or not any(said), f"{name}: {said}"

    alone(work)


def test_a_fault_of_the_table_is_tried_again_before_anything_was_changed(root: Path) -> None:
    """EMFILE from any call that opens costs a second try; from one that publishes, an error."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("k", b"data")
        for site in ("open_temp", "open_read"):
            with faults.inject(site, error=errno.EMFILE) as fault:
                store.write_block(site, b"data")
                assert bytes(store.read_block(site)) == b"data"
            assert fault.seen[faults.sites()[site]] >= 2
        with (
            faults.inject("link", error=errno.EMFILE) as fault,
            pytest.raises(kvio.TransientStorageError),
        ):
            store.write_block("x", b"data", if_exists="error")
        assert fault.seen[faults.sites()["link"]] == 1


def test_a_block_that_was_judged_is_not_judged_again(disk_path: Path) -> None:
    """A descriptor was lacking after the existing block was found damaged: it is replaced."""
    root = disk_path / "root"
    with open_or_skip(root, durability="durable") as store:
        store.write_block("k", data_of("k"))
        path = faultlab.file_of(root, "k")
        path.write_bytes(bytes(path.stat().st_size))
        with faults.inject("open_temp", error=errno.EMFILE) as fault:
            (result,) = store.write_blocks([("k", data_of("k"))])
        assert result.status == "ok"
        assert (calls(fault, "open_read"), calls(fault, "open_temp")) == (1, 2)
        assert faultlab.peek(root, "k") == data_of("k")


def test_a_file_that_cannot_be_opened_whole_leaves_no_descriptor(root: Path) -> None:
    """The file of a block as it is needs two: with one left it is an error, and none is lost."""

    def work() -> None:
        limit_descriptors(64)
        with kvio.open_store("posix-tmpfile", root=root) as store:
            store.write_blocks([(f"k{i}", b"data") for i in range(40)])
            store.write_block("k", b"data")
            backend = store._backend
            with faultlab.free_descriptors(0):
                backend.open_raw("k").close()  # those of directories are given back
            evict_all()
            before = faultlab.open_descriptors()
            with faultlab.free_descriptors(2), pytest.raises(kvio.TransientStorageError):
                backend.open_raw("k")
            evict_all()
            assert faultlab.open_descriptors() == before

    alone(work)


# A descriptor in use is not closed


def test_what_a_call_has_acquired_is_not_evicted() -> None:
    """Acquired: it stays. Released: it goes, and can no longer be acquired."""
    one = ffi.new("kvio_dir *", (77,))

    assert lib.kvio_dir_acquire(one) == lib.kvio_dir_acquire(one) == 77
    assert lib.kvio_dir_evict(one) == -1
    lib.kvio_dir_release(one)
    assert lib.kvio_dir_evict(one) == -1
    lib.kvio_dir_release(one)
    assert lib.kvio_dir_was_used(one)
    assert not lib.kvio_dir_was_used(one)
    assert lib.kvio_dir_evict(one) == 77
    assert lib.kvio_dir_acquire(one) == -1
    assert (one.fd, one.users) == (-1, 0)


def test_a_store_that_is_closed_in_the_middle_of_an_eviction_is_forgotten(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may close a store wherever Python code runs, here as well."""

    def work() -> None:
        store = kvio.open_store("posix-tmpfile", root=root)
        store.write_block("k", b"data")

        def was_used(_: KeptDirectory) -> bool:
            store.close()
            return False

        with monkeypatch.context() as patch:
            patch.setattr(KeptDirectory, "was_used", was_used)
            SHARED.give_back()
        assert not SHARED._kept

    alone(work)


@pytest.mark.parametrize("layout", ["block", "plain"])
def test_a_directory_in_use_is_not_closed_under_a_call(
    root: Path, layout: Literal["block", "plain"]
) -> None:
    """All that can be closed is, and its numbers taken, in a call: it writes where it must."""
    with kvio.open_store("posix-tmpfile", root=root, layout=layout) as store:
        store.write_blocks([(f"d{i}/k", b"data") for i in range(40)])
        elsewhere = root / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        taken: list[int] = []

        class Evicting:
            def transfer(self, call: Any, op: Any) -> None:
                evict_all()
                taken.extend(os.open(elsewhere, os.O_RDONLY) for _ in range(60))
                lib.kvio_write_batch(call, op, 1)

        engine = faultlab.engine_of(store)
        for key in ("d7/k2", "new/k2"):
            engine.write_one(key, [memoryview(b"data")], 4, "keep", None, steps=Evicting())
            assert faultlab.peek(root, key, layout=layout) == b"data"
        assert list(elsewhere.iterdir()) == []
        for fd in taken:
            os.close(fd)
        evict_all()
        assert not engine.directories.kept, "a call that has ended still holds its directory"


@pytest.mark.root
def test_a_directory_in_use_by_the_quick_path_is_not_closed(disk_path: Path) -> None:
    """While a read waits in the kernel its directory stays open; when it has ended it can go."""
    root = disk_path / "root"
    with kvio.open_store("posix-tmpfile", root=root, options=CREATE) as store:
        store.write_block("k", data_of("k"))
        store.write_block("other", b"data")
        out = bytearray(len(data_of("k")))
        reader = threading.Thread(target=store.read_block_into, args=("k", out))
        kept = faultlab.engine_of(store).directories.kept
        with SlowFile(faultlab.file_of(root, "k")) as slow:
            reader.start()
            slow.wait_for_reader()
            evict_all()
            assert [root / path for path in kept] == [faultlab.file_of(root, "k").parent]
        reader.join(60)
        assert bytes(out) == data_of("k")
        evict_all()
        assert not kept


def churn(roots: Sequence[Path], rounds: int) -> list[str]:
    """Write from several threads to stores that have descriptors for few directories.

    Returns what went wrong: errors, and blocks that lie where they do not belong.
    """
    wrong: list[str] = []
    stores = [kvio.open_store("posix-tmpfile", root=root) for root in roots]

    def work(number: int) -> None:
        nbytes = LARGE if number % 2 else 100  # a large one is in the C core for longer
        for i in range(rounds if number % 2 else 8 * rounds):
            key = f"t{number}/{i}"
            store = stores[i % len(stores)]
            try:
                store.write_block(key, data_of(key, nbytes))
                if bytes(store.read_block(key)) != data_of(key, nbytes):
                    wrong.append(f"{key} was read wrongly")
                if not number % 2:
                    batch = [(f"{key}/{j}", data_of(f"{key}/{j}")) for j in range(3)]
                    wrong.extend(repr(r.error) for r in store.write_blocks(batch) if not r.ok)
            except (kvio.KvioError, OSError) as exc:
                wrong.append(f"{key}: {exc!r}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for root in roots:
        wrong += misplaced(root)
    with suppress(OSError):
        for store in stores:
            store.close()
    return wrong


def churned(parent: Path, rounds: int, times: int, prepare: Callable[[], object]) -> str:
    """Churn in a child process until something is wrong, or so many times; what was wrong."""

    def work() -> str:
        limit_descriptors(60)
        prepare()
        for _ in range(times):
            roots = [parent / name for name in ("a", "b")]
            for root in roots:
                root.mkdir(mode=0o700)
            if wrong := churn(roots, rounds):
                return "\n".join(wrong[:3])
            for root in roots:
                shutil.rmtree(root)
        return ""

    return alone(work)


@pytest.mark.slow
def test_no_block_is_published_in_a_wrong_directory(tmp_path: Path) -> None:
    """While descriptors are closed and their numbers reused all the time, each block lies right."""
    assert churned(tmp_path, 100, 1, lambda: None) == ""


def _careless(self: KeptDirectory) -> bool:
    """Close a directory that a call uses, if there is one now."""
    if self.cdata.fd < 0:
        return True
    kept = self._owner.kept
    used = (other for other in list(kept.values()) if other.cdata.users and other.cdata.fd >= 0)
    victim = next(used, self)
    fd, victim.cdata.fd = victim.cdata.fd, -1
    kept.pop(victim.path, None)
    os.close(fd)
    return True


@pytest.mark.slow
def test_a_store_that_closes_what_is_in_use_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a store that is broken on purpose: blocks in wrong directories, or errors."""
    monkeypatch.setattr(KeptDirectory, "evict", _careless)
    said = churned(tmp_path, 100, 20, lambda: None)
    print(said)
    assert said


# Durable stores, which sync the names of directories


def syncs_of_a_write(store: kvio.Store, key: str) -> int:
    """Write a block and count the syncs of directories."""
    with faults.inject("read", nth=1 << 30) as fault:
        assert store.write_block(key, b"data").level == "durable"
    return calls(fault, "fsync_dir")


def test_a_directory_that_was_closed_meanwhile_is_not_synced_again(disk_path: Path) -> None:
    """Its own fsync is all a block costs; one that was made anew is synced in those above it."""
    root = disk_path / "root"
    with open_or_skip(root, durability="durable") as store:
        assert syncs_of_a_write(store, "k") == 1
        evict_all()
        assert syncs_of_a_write(store, "k/2") == 1
        for by_read in (False, True):
            evict_all()
            directory = faultlab.file_of(root, "k").parent
            shutil.rmtree(directory)
            directory.mkdir(mode=0o700)
            if by_read:
                with pytest.raises(kvio.BlockNotFoundError), faults.inject("read") as fault:
                    store.read_block("k")
                assert calls(fault, "fsync_dir") == 2, "a read has left it open, its name unsynced"
            assert syncs_of_a_write(store, "k") == (1 if by_read else 3)
            evict_all()
            assert syncs_of_a_write(store, "k") == 1


def test_a_directory_that_a_read_has_opened_is_synced_before_a_write(disk_path: Path) -> None:
    """In ``layout=plain`` another process may have made it, and not synced its name."""
    root = disk_path / "root"
    with open_or_skip(root, durability="durable", layout="plain") as store:
        with kvio.open_store("posix-tmpfile", root=root, layout="plain") as other:
            other.write_block("a/b/k", b"data")
        assert bytes(store.read_block("a/b/k")) == b"data"
        assert syncs_of_a_write(store, "a/b/k2") == 3
        assert syncs_of_a_write(store, "a/b/k3") == 1
        results = store.write_blocks([(f"a/b/m{i}", b"data") for i in range(9)])
        assert all(result.ok for result in results)


# Forks


def test_a_child_keeps_its_own_directories(root: Path) -> None:
    """A child has none of its parent's descriptors, evicts its own, and takes none away."""
    keys = [f"k{i}" for i in range(300)]

    def work() -> None:
        limit_descriptors(100)
        with kvio.open_store("posix-tmpfile", root=root) as store:
            store.write_blocks([(key, data_of(key)) for key in keys])
            before = faultlab.open_descriptors()

            def child() -> None:
                inherited = [p for p in faultlab.open_descriptors().values() if str(root) in p]
                assert len(inherited) <= 1, "directories of the parent are still open"
                assert all(bytes(store.read_block(key)) == data_of(key) for key in keys)
                evict_all()
                assert store.write_block("child", data_of("child")).nbytes

            children.in_child(child)
            assert faultlab.open_descriptors() == before
            assert all(bytes(store.read_block(key)) == data_of(key) for key in keys)

    alone(work)
    assert misplaced(root) == []


@pytest.mark.slow
def test_forks_while_directories_are_closed_and_opened(root: Path) -> None:
    """Twenty children of a process whose threads evict all the time: none hangs, all store."""

    def work() -> None:
        limit_descriptors(60)
        stop = threading.Event()
        wrong: list[BaseException] = []
        with kvio.open_store("posix-tmpfile", root=root) as store:

            def write(number: int) -> None:
                try:
                    i = 0
                    while not stop.is_set():
                        key = f"t{number}/{i % 500}"
                        store.write_block(key, data_of(key), if_exists="replace")
                        i += 1
                except kvio.KvioError as exc:
                    wrong.append(exc)

            threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()

            def child(number: int) -> None:
                for i in range(40):
                    key = f"c{number}/{i}"
                    store.write_block(key, data_of(key))
                    assert bytes(store.read_block(key)) == data_of(key)

            try:
                for number in range(20):
                    children.in_child(partial(child, number))
            finally:
                stop.set()
                for thread in threads:
                    thread.join(60)
        assert not wrong, wrong[:3]

    alone(work)
    assert misplaced(root) == []
    assert sum(path.name.startswith("c") for path in root.rglob("*~*")) == 800


def test_a_closed_store_leaves_no_descriptor(tmp_path: Path) -> None:
    """Neither what it kept nor its root; and none of them counts any more."""

    def work() -> None:
        before = faultlab.open_descriptors()
        for layout in ("block", "plain"):
            with kvio.open_store(
                "posix-tmpfile", root=tmp_path / layout, layout=layout, options=CREATE
            ) as store:
                store.write_blocks([(f"d{i}/k", b"data") for i in range(300)])
            assert faultlab.open_descriptors() == before
            assert (len(SHARED._kept), SHARED._roots) == (0, 0)

    alone(work)


def test_a_directory_that_got_descriptor_0_is_closed(root: Path) -> None:
    """As in a program whose standard input was closed: 0 is a descriptor like others."""
    kept_from_us = os.dup(0)
    try:
        with kvio.open_store("posix-tmpfile", root=root, layout="plain") as store:
            os.close(0)
            store.write_block("a/k", b"data")
            assert stat.S_ISDIR(os.fstat(0).st_mode)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(kept_from_us, 0)
        os.close(kept_from_us)
