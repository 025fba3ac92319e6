"""A store goes on in a forked child and in its parent, whatever its threads were doing."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvio
from kvio.url import OptionValue
from tests.posix import children, faultlab

# Python 3.12 warns of forks in threaded processes; that is the subject here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

DATA = faultlab.pattern(1, 100_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@contextmanager
def busy(store: kvio.Store, threads: int = 3) -> Iterator[None]:
    """Keep a store's threads writing, reading and looking for vanished directories."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while not stop.is_set():
                key = f"busy{number}"
                store.submit_write(key, DATA, if_exists="replace").result(60)
                assert bytes(store.read_block(key, timeout=60)) == DATA
                store.write_blocks([(f"{key}-{i}", b"data") for i in range(9)])
        except (kvio.KvioError, AssertionError) as exc:
            errors.append(exc)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)
    assert not errors, errors
    assert not any(worker.is_alive() for worker in workers)


def use(store: kvio.Store, name: str) -> None:
    """Do a little of everything."""
    assert store.write_block(name, DATA, if_exists="replace").nbytes == len(DATA)
    assert bytes(store.read_block(name, timeout=60)) == DATA
    future = store.submit_write(f"{name}/2", DATA)
    results = store.write_blocks([(f"{name}/b{i}", bytes(100_000)) for i in range(12)])
    assert all(result.ok for result in results)
    assert future.result(60).nbytes == len(DATA)
    assert store.count_leading([name, f"{name}/2", "nothing"]) == 2
    store.flush(timeout=60)


@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct", "hybrid", "memory"])
def test_a_child_uses_the_store_and_its_parent_goes_on(root: Path, backend: str) -> None:
    """Both write, read, submit and batch; what one wrote, the other sees where that is shared."""
    try:
        store = kvio.open_store(backend, root=None if backend == "memory" else root)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    with store:
        use(store, "parent")

        def work() -> None:
            use(store, "child")
            assert store.contains("parent")
            store.close()

        children.in_child(work)
        use(store, "parent-again")
        assert store.contains("child") == store.capabilities.shared


def test_forks_while_threads_are_busy(root: Path) -> None:
    """Twenty children of a process whose I/O threads never rest: none hangs, none breaks it."""
    with kvio.open_store("posix-tmpfile", root=root, io_threads=3) as store:
        with busy(store):
            for number in range(20):
                children.in_child(lambda: use(store, f"child{number}"))  # noqa: B023  # run at once
        assert all(store.verify_block(key).ok for key in store.list_keys())
        assert sum(store.contains(f"child{number}/2") for number in range(20)) == 20
    assert not faultlab.temporaries(root)


def test_a_fork_while_directories_are_looked_up_again(root: Path) -> None:
    """A child never waits for a lock that another thread of its parent held."""
    stop = threading.Event()
    keys = [f"k{i}" for i in range(64)]
    with kvio.open_store("posix-tmpfile", root=root) as store:

        def vanish() -> None:
            while not stop.is_set():
                for key in keys:
                    path = faultlab.file_of(root, key)
                    path.unlink(missing_ok=True)
                    try:
                        path.parent.rmdir()
                    except OSError:
                        continue

        def write() -> None:
            while not stop.is_set():
                store.write_blocks([(key, b"data") for key in keys])

        threads = [threading.Thread(target=vanish), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        try:
            for number in range(20):
                children.in_child(lambda: use_quietly(store, f"c{number}"))  # noqa: B023
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        use(store, "after")


def use_quietly(store: kvio.Store, name: str) -> None:
    """Write and read; the directory may vanish at any time, which is a typed error at most."""
    try:
        store.write_block(name, DATA, if_exists="replace")
        store.read_block(name)
    except (kvio.BlockNotFoundError, kvio.StorageError):
        return


def test_descriptors_are_not_shared_across_a_fork(root: Path) -> None:
    """A child that closes its store, and everything else it has, takes nothing from its parent."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        use(store, "parent")
        before = faultlab.open_descriptors()

        def work() -> None:
            use(store, "child")
            inherited = {fd: path for fd, path in before.items() if str(root) in path}
            now = {
                fd: path for fd, path in faultlab.open_descriptors().items() if str(root) in path
            }
            store.close()
            left = [p for p in faultlab.open_descriptors().values() if str(root) in p]
            assert not left, f"{inherited} {now} {left}"

        children.in_child(work)
        assert faultlab.open_descriptors() == before
        use(store, "parent-again")


def test_grandchildren_work_too(root: Path) -> None:
    """A fork of a fork has its own threads and descriptors as well."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        use(store, "a")

        def grandchild() -> None:
            use(store, "c")

        def child() -> None:
            use(store, "b")
            children.in_child(grandchild)
            use(store, "b2")

        children.in_child(child)
        assert store.count_leading(["a", "b", "c", "b2"]) == 4


def test_a_child_of_a_closed_store_is_reported_so(root: Path) -> None:
    """A store closed before the fork is closed in the child, and hurts no descriptor there."""
    store = kvio.open_store("posix-tmpfile", root=root)
    store.close()

    def work() -> None:
        with pytest.raises(kvio.StoreClosedError):
            store.write_block("k", b"data")

    children.in_child(work)


def test_a_child_whose_root_is_gone_gets_a_typed_error(root: Path) -> None:
    """If the store cannot be opened anew, calls in the child fail typed and touch nothing."""
    store = kvio.open_store("posix-tmpfile", root=root)
    store.write_block("k", b"data")
    shutil.rmtree(root)

    def work() -> None:
        # Whatever takes the old descriptors' numbers must not be used for the store's.
        decoys = [os.open(root.parent, os.O_RDONLY) for _ in range(40)]
        for call in (
            lambda: store.write_block("new", b"data"),
            lambda: store.read_block("k"),
            lambda: store.delete_block("k"),
        ):
            with pytest.raises(kvio.KvioError):
                call()
        assert decoys

    children.in_child(work)
    assert not [path for path in root.parent.rglob("*") if path.is_file()]
    store.close()


def test_statistics_start_anew_in_a_child(root: Path) -> None:
    """A child counts its own calls."""
    options: dict[str, OptionValue] = {"namespace": "n"}
    with kvio.open_store("posix-tmpfile", root=root, options=options) as store:
        store.write_block("k", b"data")

        def work() -> None:
            assert store.stats().writes == 0
            store.read_block("k")
            assert store.stats().reads == 1

        children.in_child(work)
        assert (store.stats().writes, store.stats().reads) == (1, 0)
