"""Corrupt blocks are removed, or moved out as they are, and nothing else ever is."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.abc import Backend, RawBlock
from kvio.testing.fakes import ForwardingBackend, WrappedStore
from kvio.types import BlockResult, Cancellation, Capabilities
from kvio.types import BlockStatus as Status
from tests.media import filesystem_of
from tests.posix import faultlab

KEY = "a/block"
DATA = faultlab.pattern(1, 30_000)
OTHER = faultlab.pattern(2, 30_000)


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


def rotten(store: kvio.Store, root: Path, key: str = KEY) -> bytes:
    """Put a rotten block into a store; return its stored bytes."""
    store.write_block(key, DATA, if_exists="replace")
    return faultlab.rot(root, key)


def mode_of(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("mask", [0, 0o077, 0o777])
def test_it_is_the_file_itself(store: kvio.Store, root: Path, disk_path: Path, mask: int) -> None:
    """In a file system the file goes to the directory, 0600 in 0700, whatever the umask."""
    stored = rotten(store, root)
    number = faultlab.file_of(root, KEY).stat().st_ino
    directory = disk_path / "new" / "quarantine"
    with faultlab.umask(mask & 0o077):  # the caller must be able to go through the parents
        directory.parent.mkdir()
    with faultlab.umask(mask):
        removal = store.remove_corrupt(KEY, quarantine=directory)

    path = directory / "a~block"
    assert (removal.status, removal.error, removal.path) == (Status.CORRUPT, None, str(path))
    assert (path.stat().st_ino, path.stat().st_nlink) == (number, 1)
    assert path.read_bytes() == stored
    assert (mode_of(path), mode_of(directory)) == (0o600, 0o700)
    assert not store.contains(KEY)


def test_another_file_system_gets_a_copy(store: kvio.Store, root: Path, shm_path: Path) -> None:
    """Where the file cannot go itself its bytes do, 0600 whatever the umask."""
    stored = rotten(store, root)
    with faultlab.umask(0o777):
        removal = store.remove_corrupt(KEY, quarantine=shm_path)

    path = Path(str(removal.path))
    assert path.read_bytes() == stored
    assert mode_of(path) == 0o600
    assert not store.contains(KEY)


@pytest.fixture
def shm_path(root: Path) -> Iterator[Path]:
    """A directory in memory, on another file system than the store."""
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == root.stat().st_dev:
        pytest.skip(f"no second file system: the store's is {filesystem_of(root)}")
    path = Path(tempfile.mkdtemp(prefix="kvio-test-", dir="/dev/shm"))
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_no_file_is_ever_replaced(store: kvio.Store, root: Path, disk_path: Path) -> None:
    """What has the name already stays, and the next one gets another name."""
    directory = disk_path / "quarantine"
    directory.mkdir()
    (directory / "a~block").symlink_to("elsewhere")
    kept = [rotten(store, root)]
    paths = [store.remove_corrupt(KEY, quarantine=directory).path]
    kept.append(rotten(store, root))
    paths.append(store.remove_corrupt(KEY, quarantine=directory).path)

    assert paths == [f"{directory}/a~block#2", f"{directory}/a~block#3"]
    assert [Path(str(path)).read_bytes() for path in paths] == kept
    assert (directory / "a~block").is_symlink()
    assert not (directory / "elsewhere").exists()


def test_without_a_directory_it_is_gone(store: kvio.Store, root: Path) -> None:
    """Removed is removed, counted, and no file is left."""
    rotten(store, root)

    assert store.remove_corrupt(KEY) == (KEY, Status.CORRUPT, None, None)
    assert store.stats().deletes == 1
    assert list(store.list_keys()) == []
    assert store.remove_corrupt(KEY).status is Status.MISSING
    assert store.stats().deletes == 1


class HealedMeanwhile(ForwardingBackend):
    """Another process writes a block anew while it is checked, the first time."""

    healed = False

    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        found = self.inner.verify_block(key, payload=payload, cancel=cancel)
        if not self.healed:
            self.healed = True
            self.inner.write_block(key, [memoryview(DATA)], if_exists="replace")
        return found


class HealedLater(ForwardingBackend):
    """Or while its bytes are put aside."""

    def open_raw(self, key: str) -> RawBlock:
        return _Healing(self, self.inner.open_raw(key), key)


class _Healing(RawBlock):
    placed = True

    def __init__(self, backend: ForwardingBackend, raw: RawBlock, key: str) -> None:
        self.nbytes, self._raw, self._backend, self._key = raw.nbytes, raw, backend, key

    def read_into(self, out: memoryview, offset: int) -> None:
        self._raw.read_into(out, offset)

    def is_current(self) -> bool:
        return self._raw.is_current()

    def link_to(self, dirfd: int, name: str) -> bool:
        linked = self._raw.link_to(dirfd, name)
        self._backend.write_block(self._key, [memoryview(DATA)], if_exists="replace")
        return linked

    def close(self) -> None:
        self._raw.close()


@pytest.mark.parametrize("wrap", [HealedMeanwhile, HealedLater])
def test_what_was_written_anew_meanwhile_stays(
    root: Path, disk_path: Path, wrap: type[ForwardingBackend]
) -> None:
    """A block that takes the corrupt one's place at any moment is not removed, nor moved out."""
    directory = disk_path / "quarantine"
    with WrappedStore(f"hybrid://{root}", wrap) as store:
        rotten(store, root)
        removal = store.remove_corrupt(KEY, quarantine=directory)

        assert (removal.status, removal.error, removal.path) == (Status.OK, None, None)
        assert store.read_block(KEY) == DATA
    assert not directory.exists() or list(directory.iterdir()) == []


class Unreadable(ForwardingBackend):
    """A disk whose second sector cannot be read, and whose files cannot be linked."""

    def open_raw(self, key: str) -> RawBlock:
        return _Unreadable(self, self.inner.open_raw(key), key)


class _Unreadable(_Healing):
    def read_into(self, out: memoryview, offset: int) -> None:
        if offset < 8192 and offset + len(out) > 4096:
            raise kvio.StorageError("read the file", errno=errno.EIO)
        self._raw.read_into(out, offset)

    def link_to(self, dirfd: int, name: str) -> bool:
        del dirfd, name
        return False


def test_what_cannot_be_read_is_zeros(root: Path, disk_path: Path) -> None:
    """A copy has every byte that can be read at its place, and takes no other file's place."""
    directory = disk_path / "quarantine"
    with WrappedStore(f"hybrid://{root}", Unreadable) as store:
        for name in ("a~block", "a~block#2"):
            stored = rotten(store, root)
            removal = store.remove_corrupt(KEY, quarantine=directory)

            assert removal.path == f"{directory}/{name}"
            copy = (directory / name).read_bytes()
            assert copy == stored[:4096] + bytes(4096) + stored[8192:]
            (directory / name).write_bytes(b"another file")
    assert {file.read_bytes() for file in directory.iterdir()} == {b"another file"}


def test_a_directory_that_takes_nothing_leaves_the_block(store: kvio.Store, root: Path) -> None:
    """Nothing is removed whose bytes could not be put aside."""
    stored = rotten(store, root)
    not_a_directory = root.parent / "file"
    not_a_directory.write_bytes(b"")

    removal = store.remove_corrupt(KEY, quarantine=not_a_directory)

    assert isinstance(removal.error, kvio.StorageError)
    assert faultlab.file_of(root, KEY).read_bytes() == stored


def test_what_is_no_file_is_left(store: kvio.Store, root: Path) -> None:
    """A link under a block's name is neither followed nor moved."""
    rotten(store, root)
    path = faultlab.file_of(root, KEY)
    target = path.rename(path.with_name("target"))
    path.symlink_to(target)

    for quarantine in (None, root.parent / "quarantine"):
        removal = store.remove_corrupt(KEY, quarantine=quarantine)
        assert isinstance(removal.error, kvio.UnsupportedError)
    assert path.is_symlink()
    assert target.exists()


def test_blocks_of_another_namespace_are_left(root: Path) -> None:
    """A store that is opened with a wrong namespace removes nothing of the right one."""
    keys = [f"k{i}" for i in range(300)]  # some lie where both namespaces look for them
    with kvio.open_store("hybrid", root=root, options={"namespace": "right"}) as store:
        store.write_blocks([(key, DATA[:100]) for key in keys])
        with kvio.open_store("hybrid", root=root, options={"namespace": "wrong"}) as other:
            found = {other.remove_corrupt(key).status for key in keys}

        assert Status.CORRUPT not in found
        assert all(store.verify_block(key).ok for key in keys)


class HandsOutNothing(ForwardingBackend):
    """A backend that does not promise ``raw_blocks``."""

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, raw_blocks=False)


def test_a_backend_that_hands_out_nothing_says_so(root: Path) -> None:
    """Before anything is done, in the store and in the command."""
    checks = pytest.importorskip("kvio.cli.checks", reason="the extra cli is not installed")
    with WrappedStore(f"hybrid://{root}", HandsOutNothing) as store:
        rotten(store, root)
        with pytest.raises(kvio.UnsupportedError, match="hybrid"):
            store.remove_corrupt(KEY)
        with pytest.raises(kvio.UnsupportedError, match="kvio rm"):
            checks._prepare_removal(store, str(root.parent / "quarantine"))

        assert store.verify_block(KEY).status is Status.CORRUPT
    assert not (root.parent / "quarantine").exists()


def test_the_default_of_backends_is_to_hand_out_nothing() -> None:
    """A backend from elsewhere needs no new method."""
    with pytest.raises(kvio.UnsupportedError):
        Backend.open_raw(ForwardingBackend.__new__(ForwardingBackend), KEY)


def test_memory_hands_out_what_it_has(tmp_path: Path) -> None:
    """Of a block in memory its payload is all there is."""
    with kvio.open_store("memory") as store:
        store.write_block(KEY, DATA)
        block = store._backend._blocks[KEY]  # type: ignore[attr-defined]
        object.__setattr__(block, "data", OTHER)
        removal = store.remove_corrupt(KEY, quarantine=tmp_path)

        assert Path(str(removal.path)).read_bytes() == OTHER
        assert not store.contains(KEY)
        assert store.remove_corrupt(KEY).status is Status.MISSING


def test_no_descriptor_is_left_open(store: kvio.Store, root: Path, disk_path: Path) -> None:
    """However it ends."""
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(20):
        rotten(store, root)
        store.remove_corrupt(KEY, quarantine=disk_path / "quarantine" if turn % 2 else None)
        store.remove_corrupt(KEY)
        faultlab.file_of(root, KEY).symlink_to("nowhere")
        store.remove_corrupt(KEY)
        faultlab.file_of(root, KEY).unlink()

    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the directory of the key
