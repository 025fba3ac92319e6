"""A file that becomes a block: taken where it can be, copied where not, never lost or shared."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.types import MiB
from tests.posix import faultlab, mounts
from tests.posix.test_kill import in_child, killed

DATA = faultlab.pattern(1, 300_000)
MOVED = "the file itself became the block"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file beside the root."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


@pytest.fixture(params=["block", "plain"])
def store(root: Path, request: pytest.FixtureRequest) -> Iterator[kvio.Store]:
    """A store of each layout."""
    with kvio.open_store("posix-tmpfile", root=root, layout=request.param) as opened:
        yield opened


def layout_of(store: kvio.Store) -> str:
    """Return the layout that the store was opened with."""
    return str(store.url.options["layout"])


def test_a_moved_file_is_the_block(store: kvio.Store, root: Path, file: Path) -> None:
    """The inode stays the same, with the permissions of a block, and the path is free."""
    inode = file.stat().st_ino
    file.chmod(0o666)

    receipt = store.write_file("a/b", file, move=True)

    assert receipt.reason == MOVED
    assert receipt.checksum == faultlab.crc32c(DATA)
    stored = faultlab.file_of(root, "a/b", layout=layout_of(store))
    assert stored.stat().st_ino == inode
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert store.read_block("a/b") == DATA
    assert not file.exists()


def test_a_file_that_another_writes_is_refused(store: kvio.Store, file: Path) -> None:
    """An open descriptor, and a mapping whose descriptor is closed, could change the block."""
    with file.open("r+b"), pytest.raises(kvio.TransientStorageError, match="open for writing"):
        store.write_file("k", file, move=True)
    script = (
        "import mmap,sys; f=open(sys.argv[1],'r+b'); m=mmap.mmap(f.fileno(),0); f.close();"
        "print('mapped',flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(kvio.TransientStorageError, match="open for writing"):
            store.write_file("k", file, move=True)
        other.communicate()

    assert file.read_bytes() == DATA
    assert not store.contains("k")
    assert store.write_file("k", file, move=True).reason == MOVED


def test_a_file_with_another_name_is_copied(store: kvio.Store, file: Path, tmp_path: Path) -> None:
    """Its other name could change the block; it keeps the bytes that it had."""
    other = tmp_path / "other"
    other.hardlink_to(file)

    receipt = store.write_file("k", file, move=True)

    assert receipt.reason != MOVED
    assert store.read_block("k") == DATA
    assert not file.exists()
    other.write_bytes(b"changed")
    assert store.read_block("k") == DATA


@pytest.mark.root
def test_a_file_on_another_file_system_is_copied(root: Path, tmp_path: Path) -> None:
    """It is removed when the copy is stored, and not before."""
    with (
        mounts.loop_filesystem("ext4", tmp_path) as other,
        kvio.open_store("posix-tmpfile", root=root) as store,
    ):
        path = other / "file"
        path.write_bytes(DATA)
        with faults.inject("link", error=errno.ENOSPC), pytest.raises(kvio.StorageFullError):
            store.write_file("k", path, move=True)
        assert path.read_bytes() == DATA

        receipt = store.write_file("k", path, move=True)

        assert receipt.reason != MOVED
        assert store.read_block("k") == DATA
        assert not path.exists()


def test_a_rename_that_is_refused_leaves_the_file_to_be_copied(
    store: kvio.Store, file: Path
) -> None:
    """Two mounts of one file system have one device number, but a rename is EXDEV."""
    with faults.inject("rename", error=errno.EXDEV):
        receipt = store.write_file("k", file, move=True)

    assert receipt.reason != MOVED
    assert receipt.nbytes == len(DATA)
    assert store.read_block("k") == DATA
    assert not file.exists()


@pytest.mark.parametrize("if_exists", ["keep", "replace", "error"])
def test_without_rename_noreplace_a_link_does(
    store: kvio.Store, file: Path, if_exists: kvio.types.IfExists
) -> None:
    """NFS and old kernels refuse the flag."""
    with faults.inject("rename", error=errno.EINVAL):
        if if_exists == "replace":
            with pytest.raises(kvio.StorageError):
                store.write_file("k", file, move=True, if_exists=if_exists)
            assert file.read_bytes() == DATA
            return
        receipt = store.write_file("k", file, move=True, if_exists=if_exists)

    assert receipt.reason == MOVED
    assert store.read_block("k") == DATA
    assert not file.exists()


def test_a_move_by_link_that_was_killed_is_completed(
    store: kvio.Store, root: Path, file: Path
) -> None:
    """Where the file has both names, the next move removes its own, for every *if_exists*."""
    layout = layout_of(store)
    choices: tuple[kvio.types.IfExists, ...] = ("keep", "replace", "error")
    for if_exists in choices:
        store.write_file("k", file, move=True, if_exists="replace")
        file.hardlink_to(faultlab.file_of(root, "k", layout=layout))

        receipt = store.write_file("k", file, move=True, if_exists=if_exists)

        assert receipt.existed
        assert receipt.nbytes == len(DATA)
        assert not file.exists()
        assert store.read_block("k") == DATA
        file.write_bytes(DATA)


def test_a_move_that_was_killed_with_a_trailer_appended_is_done_again(
    root: Path, file: Path
) -> None:
    """The trailer is known as one, and does not become payload."""

    def work() -> None:
        with (
            kvio.open_store("posix-tmpfile", root=root) as store,
            faults.inject("rename", error=faults.KILL),
        ):
            store.write_file("k", file, move=True)

    assert killed(in_child(work))
    assert len(file.read_bytes()) == len(DATA) + faultlab.TRAILER_BYTES
    assert file.read_bytes()[: len(DATA)] == DATA
    with kvio.open_store("posix-tmpfile", root=root) as store:
        assert store.write_file("k", file, move=True).nbytes == len(DATA)
        assert store.read_block("k") == DATA


def test_a_payload_that_ends_with_a_damaged_trailer_is_payload(root: Path, file: Path) -> None:
    """Only a trailer of this key, whose checksum is that of the bytes before it, is taken off."""
    foreign = faultlab.seal(DATA, "another")
    damaged = bytearray(faultlab.seal(DATA, "k"))
    damaged[7] ^= 1
    with kvio.open_store("posix-tmpfile", root=root) as store:
        for content in (foreign, bytes(damaged)):
            file.write_bytes(content)
            receipt = store.write_file("k", file, move=True, if_exists="replace")
            assert receipt.nbytes == len(content)
            assert store.read_block("k") == content


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "link"])
def test_what_is_not_a_regular_file_is_refused(
    store: kvio.Store, tmp_path: Path, file: Path, kind: str
) -> None:
    """A move takes no symbolic link either; nothing waits for a FIFO."""
    path = tmp_path / "thing"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(file)

    with pytest.raises(kvio.StorageError) as caught:
        store.write_file("k", path, move=True)

    assert caught.value.key == "k"
    assert not store.contains("k")
    assert file.read_bytes() == DATA


def test_a_copy_follows_a_link(store: kvio.Store, tmp_path: Path, file: Path) -> None:
    """Without *move* a path means what it does to other programs, and stays."""
    link = tmp_path / "link"
    link.symlink_to(file)

    store.write_file("k", link)

    assert store.read_block("k") == DATA
    assert link.is_symlink()


def test_a_write_to_a_copied_file_does_not_change_the_block(store: kvio.Store, file: Path) -> None:
    """A clone shares extents until one of the two is written, and no longer."""
    store.write_file("k", file)
    with file.open("r+b") as opened:
        opened.write(b"changed")

    assert store.read_block("k") == DATA


@pytest.mark.root
def test_a_file_system_that_clones_makes_no_second_copy(tmp_path: Path) -> None:
    """On XFS a stored file shares its extents, and the block is as whole as any."""
    with mounts.loop_filesystem("xfs", tmp_path) as root:
        path = root / "file"
        path.write_bytes(DATA)
        (root / "store").mkdir(mode=0o700)
        for name, options in (("posix-tmpfile", {}), ("posix-direct", {"publish": "rename"})):
            with kvio.open_store(name, root=root / "store", options=options) as store:
                receipt = store.write_file("k", path, if_exists="replace")

                assert receipt.reason.startswith("a clone")
                assert store.verify_block("k").ok
                assert faultlab.peek(root / "store", "k") == DATA
                assert path.read_bytes() == DATA


def test_a_damaged_block_is_replaced_by_a_file(root: Path, file: Path) -> None:
    """``keep`` does not keep a block that this store has found corrupt."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("k", DATA)
        faultlab.rot(root, "k")
        with pytest.raises(kvio.CorruptBlockError):
            store.read_block("k")

        assert not store.write_file("k", file, move=True).existed

        assert store.read_block("k") == DATA


def test_a_long_file_is_copied_with_little_memory(root: Path, file: Path) -> None:
    """More than is held in memory goes through the stream of the backend."""
    with file.open("r+b") as opened:
        opened.truncate(65 * MiB)
    with kvio.open_store("posix-tmpfile", root=root) as store:
        assert store.write_file("k", file).nbytes == 65 * MiB
        assert store.verify_block("k").ok
        assert store.read_block("k", nbytes=len(DATA)) == DATA


def test_a_move_with_a_deadline_is_a_move(store: kvio.Store, file: Path) -> None:
    """It runs on another thread, and does the same."""
    assert store.write_file("k", file, move=True, timeout=60).reason == MOVED
    assert store.read_block("k") == DATA


async def _moved(store: kvio.Store, file: Path) -> kvio.Receipt:
    return await kvio.AsyncStore(store).write_file("k", file, move=True)


def test_an_async_store_moves_a_file(store: kvio.Store, file: Path) -> None:
    """It awaits the same method."""
    assert asyncio.run(_moved(store, file)).reason == MOVED
    assert store.read_block("k") == DATA


def test_put_moves_a_file(root: Path, file: Path) -> None:
    """``kvio put --move`` takes the file, and refuses what is no file."""
    command = [sys.executable, "-m", "kvio", "put", "--move", str(root), "k"]

    refused = subprocess.run([*command, "-"], capture_output=True, text=True, check=False)
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)

    assert refused.returncode == 2
    assert done.returncode == 0, done.stderr
    assert MOVED in done.stdout
    assert not file.exists()
    assert faultlab.peek(root, "k") == DATA


def test_a_scratch_directory_is_one_to_move_from(store: kvio.Store, root: Path) -> None:
    """It is below the root, holds no keys, is no live writer's leftover, and ends."""
    with store.scratch_dir() as scratch:
        assert scratch.parent == root
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
        (scratch / "f").write_bytes(DATA)
        (scratch / "rest").write_bytes(DATA)
        assert store.sweep() == []
        assert store.write_file("k", scratch / "f", move=True).reason == MOVED
        assert list(store.list_keys()) == ["k"]
    assert not scratch.exists()


def test_a_sweep_removes_the_scratch_directories_of_the_dead(root: Path) -> None:
    """With what is in them, and nothing that a link in them leads to."""

    def work() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store, store.scratch_dir() as scratch:
            (scratch / "f").write_bytes(DATA)
            (scratch / "link").symlink_to(root.parent)
            os.kill(os.getpid(), 9)

    assert killed(in_child(work))
    (left,) = faultlab.temporaries(root)
    with kvio.open_store("posix-tmpfile", root=root) as store:
        assert store.sweep(dry_run=True) == [str(left)]
        assert left.exists()
        assert store.sweep() == [str(left)]
    assert not left.exists()
    assert root.parent.exists()
