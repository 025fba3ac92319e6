"""Several processes and threads on one root, and directories that vanish under them."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

import kvio
from kvio._native import faults
from kvio.url import OptionValue
from tests.posix import children, faultlab
from tests.posix.children import NO_RENAME_FLAGS, NO_TMPFILE

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

WRITERS = 4
NBYTES = 150_000
PUBLISH: dict[str, dict[str, OptionValue]] = {"tmpfile": {}, "rename": {"publish": "rename"}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def side_by_side(work: Callable[[int], str]) -> list[str]:
    """Run *work* in several processes that start together; what each said."""
    start_read, start_write = os.pipe()
    pids, pipes = [], []
    for number in range(WRITERS):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(start_write)
                os.read(start_read, 1)
                os.write(write_end, work(number).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(write_end)
        pids.append(pid)
        pipes.append(read_end)
    os.close(start_read)
    os.close(start_write)  # everybody's read returns now
    said = []
    for pid, pipe in zip(pids, pipes, strict=True):
        with os.fdopen(pipe) as text:
            said.append(text.read())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return said


@pytest.mark.parametrize("publish", PUBLISH)
def test_exactly_one_exclusive_writer_wins(root: Path, publish: str) -> None:
    """Of several processes with ``if_exists="error"`` one gets each key, and its bytes stay."""
    keys = [f"k{i}" for i in range(40)]

    def work(number: int) -> str:
        won = []
        with kvio.open_store("posix-tmpfile", root=root, options=PUBLISH[publish]) as store:
            for key in keys:
                try:
                    store.write_block(key, bytes([number]) * NBYTES, if_exists="error")
                except kvio.BlockExistsError:
                    continue
                won.append(key)
        return " ".join(won)

    said = side_by_side(work)

    winners = {key: number for number, won in enumerate(said) for key in won.split()}
    assert Counter(key for won in said for key in won.split()) == Counter(keys)
    for key in keys:
        assert faultlab.peek(root, key) == bytes([winners[key]]) * NBYTES
    assert not faultlab.temporaries(root)


def test_exclusive_writers_without_rename_flags(root: Path) -> None:
    """The same over link and unlink, as NFS needs it."""
    children.need_seccomp()

    def work(number: int) -> str:
        children.refuse((NO_TMPFILE, NO_RENAME_FLAGS))
        with kvio.open_store("posix-tmpfile", root=root) as store:
            results = store.write_blocks(
                [(f"k{i}", bytes([number]) * 1000) for i in range(100)], if_exists="error"
            )
        assert {result.status for result in results} <= {"ok", "exists"}
        return " ".join(result.key for result in results if result.ok)

    said = side_by_side(work)

    assert Counter(" ".join(said).split()) == Counter(f"k{i}" for i in range(100))
    assert not faultlab.temporaries(root)


@pytest.mark.parametrize("publish", PUBLISH)
@pytest.mark.parametrize("if_exists", ["keep", "replace"])
def test_racing_writers_leave_one_whole_block(
    root: Path, publish: str, if_exists: Literal["keep", "replace"]
) -> None:
    """Every writer succeeds, every reader meanwhile sees some writer's whole block."""
    versions = [bytes([number]) * NBYTES for number in range(WRITERS)]

    def work(number: int) -> str:
        with kvio.open_store("posix-tmpfile", root=root, options=PUBLISH[publish]) as store:
            existed = 0
            for i in range(30):
                receipt = store.write_block(f"k{i % 3}", versions[number], if_exists=if_exists)
                existed += receipt.existed
                assert bytes(store.read_block(f"k{i % 3}")) in versions
        return str(existed)

    said = side_by_side(work)

    assert all(faultlab.peek(root, f"k{i}") in versions for i in range(3))
    total = sum(map(int, said))
    assert total == (30 * WRITERS - 3 if if_exists == "keep" else 0)
    assert not faultlab.temporaries(root)


def test_readers_see_old_or_new_while_a_block_is_replaced_and_deleted(root: Path) -> None:
    """A reader never sees a mixture, a short block or an error but "not there"."""
    versions = [bytes([number]) * (NBYTES + number) for number in range(5)]
    stop = threading.Event()
    wrong: list[str] = []
    seen: Counter[int] = Counter()
    with kvio.open_store("posix-tmpfile", root=root) as store:

        def read() -> None:
            while not stop.is_set():
                try:
                    got = bytes(store.read_block("k"))
                except kvio.BlockNotFoundError:
                    continue
                except kvio.KvioError as exc:
                    wrong.append(repr(exc))
                    continue
                seen[got[0]] += 1
                if got not in versions:
                    wrong.append(f"{len(got)} bytes of {set(got)}")

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for _ in range(60):
            for version in versions:
                store.write_block("k", version, if_exists="replace")
            store.delete_block("k")
        stop.set()
        for reader in readers:
            reader.join(60)

    assert not wrong, wrong[:3]
    assert seen


def test_many_threads_open_one_root_at_the_same_moment(root: Path) -> None:
    """What one opener tries out in the root does not confuse another."""
    barrier = threading.Barrier(8)

    def work(number: int) -> str:
        for turn in range(10):
            barrier.wait(60)
            with kvio.open_store("posix-tmpfile", root=root) as store:
                store.write_block(f"k{number}-{turn}", b"data")
                publish = store.capabilities.publish
                notes = store.capabilities.notes
        return f"{publish} {notes}"

    with ThreadPoolExecutor(8) as pool:
        said = set(pool.map(work, range(8)))

    assert len(said) == 1, said
    assert not faultlab.temporaries(root)
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_batches_of_many_threads_do_not_mix(root: Path) -> None:
    """Threads that share a store get their own blocks back."""
    with kvio.open_store("hybrid", root=root, io_threads=3) as store:

        def work(number: int) -> None:
            items = [(f"t{number}/{i}", bytes([number]) * (997 * i)) for i in range(60)]
            assert all(result.ok for result in store.write_blocks(items))
            outs = [(key, bytearray(len(data))) for key, data in items]
            assert all(result.ok for result in store.read_blocks_into(outs))
            assert [bytes(out) for _, out in outs] == [data for _, data in items]

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert sum(1 for _ in store.list_keys()) == 360


# Directories that vanish


@pytest.mark.parametrize("publish", PUBLISH)
def test_a_fan_out_directory_that_vanishes_is_made_again(root: Path, publish: str) -> None:
    """Writing goes on, reading and deleting say "not there"; single calls and batches."""
    with kvio.open_store("posix-tmpfile", root=root, options=PUBLISH[publish]) as store:
        items = [(f"k{i}", b"data") for i in range(40)]
        assert all(result.ok for result in store.write_blocks(items))
        for path in root.iterdir():
            shutil.rmtree(path)

        with pytest.raises(kvio.BlockNotFoundError):
            store.read_block("k1")
        assert not store.delete_block("k2")
        assert not store.contains("k3")
        rooms = [(key, bytearray(4)) for key, _ in items]
        assert {result.status for result in store.read_blocks_into(rooms)} == {"missing"}
        assert store.write_block("k1", b"data").nbytes == 4
        assert all(result.ok for result in store.write_blocks(items))
        assert all(faultlab.peek(root, key) == b"data" for key, _ in items)
        assert all(result.ok for result in store.read_blocks_into(rooms))


def test_a_directory_made_again_by_another_process_is_used(root: Path) -> None:
    """Blocks that another process wrote into the new directory are found."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("k", b"old")
        shutil.rmtree(faultlab.file_of(root, "k").parent.parent)

        def work() -> None:
            with kvio.open_store("posix-tmpfile", root=root) as other:
                other.write_block("k", b"from another process")

        children.in_child(work)

        assert bytes(store.read_block("k")) == b"from another process"
        assert store.write_block("k", b"new", if_exists="replace").nbytes == 3
        assert faultlab.peek(root, "k") == b"new"


def test_a_root_that_vanishes_fails_typed(root: Path) -> None:
    """Removed or removed and made again: writes fail and say so, nothing is stored elsewhere."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("k", b"data")
        before = len(faultlab.open_descriptors())
        shutil.rmtree(root)
        for remade in (False, True):
            if remade:
                root.mkdir(mode=0o700)
            with pytest.raises(kvio.StorageError):
                store.write_block("k", b"data")
            with pytest.raises(kvio.StorageError):
                store.write_block("other", b"data")
            with pytest.raises(kvio.KvioError):
                store.read_block("k")
            results = store.write_blocks([(f"k{i}", b"data") for i in range(9)])
            assert all(isinstance(result.error, kvio.StorageError) for result in results)
            assert list(store.list_keys()) == []
        assert len(faultlab.open_descriptors()) <= before
    assert list(root.iterdir()) == []


def test_directories_that_come_and_go_under_many_threads(root: Path) -> None:
    """While directories vanish again and again, blocks are whole or absent, no call breaks."""
    stop = threading.Event()
    keys = [f"k{i}" for i in range(16)]
    unexpected: list[BaseException] = []
    with kvio.open_store("posix-tmpfile", root=root, io_threads=3) as store:

        def work(number: int) -> None:
            while not stop.is_set():
                results = store.write_blocks([(key, key.encode() * 99) for key in keys])
                # A directory may vanish twice in a row: then it is ESTALE or ENOENT.
                unexpected.extend(
                    result.error or AssertionError(result)
                    for result in results
                    if not result.ok and not isinstance(result.error, kvio.StorageError)
                )
                try:
                    key = keys[number]
                    assert bytes(store.read_block(key)) == key.encode() * 99
                except (kvio.BlockNotFoundError, kvio.StorageError):
                    continue
                except AssertionError as exc:
                    unexpected.append(exc)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(200):
            path = faultlab.file_of(root, keys[turn % len(keys)]).parent.parent
            shutil.rmtree(path, ignore_errors=True)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not unexpected, unexpected[:3]
        # Kept descriptors never come to mean another directory.
        last = store.write_blocks([(key, key.encode()) for key in keys], if_exists="replace")
        assert not [result.error for result in last if not result.ok]
        assert all(faultlab.peek(root, key) == key.encode() for key in keys)


def test_a_store_can_be_closed_while_others_use_it(root: Path) -> None:
    """Calls under way end well, later ones are refused; no descriptor stays or is closed twice."""
    before = faultlab.open_descriptors()
    for _ in range(20):
        store = kvio.open_store("posix-tmpfile", root=root, io_threads=3)
        started = threading.Barrier(4)
        ends: list[str] = []

        def work(number: int) -> None:
            started.wait(60)  # noqa: B023
            try:
                while True:
                    store.write_block(f"k{number}", bytes(NBYTES), if_exists="replace")  # noqa: B023  # joined below
                    store.submit_write(f"s{number}", bytes(NBYTES)).result(60)  # noqa: B023
                    store.write_blocks([(f"b{number}", bytes(NBYTES))])  # noqa: B023
            except kvio.StoreClosedError:
                ends.append("closed")  # noqa: B023

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        started.wait(60)
        store.close()
        for thread in threads:
            thread.join(60)
        assert ends == ["closed"] * 3
    assert faultlab.open_descriptors() == before


def test_a_fault_in_one_thread_is_no_other_threads(root: Path) -> None:
    """With every tenth write failing, exactly those blocks fail."""
    with (
        kvio.open_store("posix-tmpfile", root=root, io_threads=3) as store,
        faults.inject("write", nth=10, times=7, error=28),
    ):
        results = store.write_blocks([(f"k{i}", bytes(30_000)) for i in range(100)])

    assert sum(not result.ok for result in results) == 7
    for result in results:
        assert (faultlab.peek(root, result.key) is not None) == result.ok
