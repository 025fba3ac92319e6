"""Stores in trees and on mounts that cannot be written: all that only reads works there."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio.types import Layout
from kvio.url import OptionValue
from tests.cli import running as cli
from tests.media import filesystem_of
from tests.posix import children, faultlab, mounts

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

USER: Final = 65534
BLOCKS: Final = {f"d{i % 3}/k{i}": os.urandom(5000 + i) for i in range(20)}
DAMAGED: Final = "d0/damaged"


def fill(root: Path, layout: Layout) -> None:
    """Write what the tests read, a leftover among it, and damage one block where that shows."""
    with kvio.open_store("posix-tmpfile", root=root, layout=layout) as store:
        for key, data in BLOCKS.items():
            store.write_block(key, data)
        if layout == "block":
            store.write_block(DAMAGED, b"data")
            with faultlab.file_of(root, DAMAGED).open("r+b") as file:
                file.write(b"D")


def snapshot(root: Path) -> set[tuple[object, ...]]:
    """Everything that a write would change: names, inodes, modes, sizes, times."""
    return {
        (path, info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        for path in (root, *root.rglob("*"))
        if (info := path.lstat())
    }


def read_all(store: kvio.Store, layout: Layout) -> None:
    """Use every call that only reads."""
    keys = list(BLOCKS)
    extra = {DAMAGED} if layout == "block" else set()
    assert not store.capabilities.writable
    assert not store.capabilities.durable_write
    assert any("read-only" in note for note in store.capabilities.notes)
    for key, data in BLOCKS.items():
        assert bytes(store.read_block(key)) == data
        assert bytes(store.read_block(key, offset=7, nbytes=100)) == data[7:107]
        assert store.stat_block(key).nbytes == len(data)
        assert store.contains(key)
        assert store.verify_block(key).ok
    rooms = {key: bytearray(len(data)) for key, data in BLOCKS.items()}
    assert all(result.ok for result in store.read_blocks_into(rooms.items()))
    assert rooms == BLOCKS
    future = store.submit_read_into(keys[0], rooms[keys[0]])
    assert future.result(30) == len(BLOCKS[keys[0]])
    assert set(store.list_keys()) == BLOCKS.keys() | extra
    assert set(store.list_keys("d1/")) == {key for key in keys if key.startswith("d1/")}
    assert store.count_leading([*keys, "none"]) == len(keys)
    assert store.sweep(dry_run=True) == []
    with pytest.raises(kvio.BlockNotFoundError):
        store.read_block("none")
    if extra:
        assert store.verify_block(DAMAGED).status == "corrupt"
        with pytest.raises(kvio.CorruptBlockError):
            store.read_block(DAMAGED)


def denied(call: Callable[[], object], key: str | None, root: Path) -> None:
    """The error says which block and root, and its number is that of a read-only file system."""
    with pytest.raises(kvio.AccessDeniedError) as caught:
        call()
    assert (caught.value.errno, caught.value.key) == (errno.EROFS, key)
    assert str(root) in str(caught.value)


def refuse_all(store: kvio.Store, root: Path) -> None:
    """Every call that would change something is refused with one typed error."""
    key = next(iter(BLOCKS))
    for name in (key, "new"):
        denied(partial(store.write_block, name, b"data"), name, root)
        denied(partial(store.write_block, name, b"data", timeout=30), name, root)
        denied(store.submit_write(name, b"data").result, name, root)
        denied(partial(store.delete_block, name), name, root)
        denied(partial(store.remove_corrupt, name), name, root)
    denied(lambda: store.write_block(key, b"data", if_exists="replace"), key, root)
    denied(store.sweep, None, root)
    results = [*store.write_blocks([(key, b"1"), ("n", b"2")]), *store.delete_blocks([key, "n"])]
    assert [(r.key, r.status) for r in results] == [(key, "failed"), ("n", "failed")] * 2
    for result in results:
        assert isinstance(result.error, kvio.AccessDeniedError)
        assert result.error.errno == errno.EROFS


def use(root: Path, backend: str, layout: Layout, **options: OptionValue) -> None:
    """Open, read all, and be refused all; nothing of the tree has changed."""
    before = snapshot(root)
    how: dict[str, Any] = {"layout": layout, "options": options}
    with kvio.open_store(backend, root=root, **how) as store:
        read_all(store, layout)
        refuse_all(store, root)
        children.in_child(lambda: read_all(store, layout))
        read_all(store, layout)
    assert snapshot(root) == before


@contextmanager
def remounted(mountpoint: Path, *options: str) -> Iterator[None]:
    """Mount it read-only, for a while."""
    subprocess.run(["mount", "-o", ",".join(("remount", *options, "ro")), mountpoint], check=True)
    try:
        yield
    finally:
        subprocess.run(
            ["mount", "-o", ",".join(("remount", *options, "rw")), mountpoint], check=True
        )


@pytest.fixture(params=["remounted", "bound"])
def read_only_mount(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Layout], Path]]:
    """A function that makes a store on a file system that is then mounted read-only."""
    with mounts.loop_filesystem("ext4", tmp_path, "-N", "2048") as root:
        mountpoint = root.parent
        bound = tmp_path / "bound"
        bound.mkdir()
        ends: list[Any] = []

        def make(layout: Layout) -> Path:
            fill(root, layout)
            if request.param == "remounted":
                ends.append(remounted(mountpoint))
                ends[0].__enter__()
                return root
            subprocess.run(["mount", "--bind", mountpoint, bound], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", bound], check=True)
            return bound / "root"

        yield make
        for end in ends:
            end.__exit__(None, None, None)
        if bound.is_mount():
            subprocess.run(["umount", bound], check=True)


@pytest.mark.root
@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct", "hybrid"])
def test_a_read_only_mount_is_read(
    read_only_mount: Callable[[Layout], Path], backend: str, layout: Layout
) -> None:
    """By itself and by the option; with options of writers as well, which ask for nothing there."""
    root = read_only_mount(layout)
    use(root, backend, layout)
    use(root, backend, layout, read_only=True)
    use(root, backend, layout, create=True, durability="durable")


@pytest.mark.root
@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("owner", ["its own", "another's"])
def test_a_tree_without_permission_to_write_is_read(
    public: Path, layout: Layout, owner: str
) -> None:
    """An unprivileged user reads it, and its modes stay: none is repaired."""
    root = public / "root"
    root.mkdir(mode=0o700)
    fill(root, layout)
    mine = owner == "its own"
    for path in (root, *root.rglob("*")):
        path.chmod((0o500 if path.is_dir() else 0o400) | (0 if mine else 0o055))
        if mine:
            os.chown(path, USER, USER)

    def work() -> None:
        children.become(USER)
        options: dict[str, OptionValue] = {} if mine else {"shared_root": True}
        use(root, "hybrid", layout, **options)
        with pytest.raises(kvio.AccessDeniedError) as caught:
            kvio.open_store("hybrid", root=root, options={**options, "read_only": False})
        assert str(root) in str(caught.value)

    children.in_child(work)
    assert {stat.S_IMODE(path.stat().st_mode) & 0o200 for path in root.rglob("*")} == {0}


@pytest.mark.root
def test_a_root_where_no_file_can_be_made_is_read(tmp_path: Path) -> None:
    """Permission bits do not say so, as of an immutable directory: trying does."""
    with mounts.loop_filesystem("ext4", tmp_path, "-N", "2048") as root:
        fill(root, "block")
        done = subprocess.run(["chattr", "+i", root], check=False, capture_output=True)
        if done.returncode:
            pytest.skip("chattr does not work here")
        try:
            use(root, "hybrid", "block")
        finally:
            subprocess.run(["chattr", "-i", root], check=True)


@pytest.mark.parametrize("layout", ["block", "plain"])
def test_read_only_by_option_changes_nothing_where_all_could_be(
    disk_path: Path, layout: Layout
) -> None:
    """Not even a file to try something with is made; and no root."""
    root = disk_path / "root"
    root.mkdir(mode=0o700)
    fill(root, layout)
    use(root, "hybrid", layout, read_only=True)
    use(root, "hybrid", layout, read_only=True, durability="durable")
    with pytest.raises(kvio.ConfigError, match="does not exist"):
        kvio.open_store(
            "hybrid", root=disk_path / "none", options={"read_only": True, "create": True}
        )
    assert not (disk_path / "none").exists()


@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct", "hybrid"])
def test_a_root_without_a_block_opens_read_only(disk_path: Path, backend: str) -> None:
    """There is nothing that could show what its file system can do; a link is no block."""
    root = disk_path / "root"
    root.mkdir(mode=0o700)
    link = faultlab.file_of(root, "link")
    link.parent.mkdir(parents=True, mode=0o700)
    link.symlink_to("/etc/hostname")
    with kvio.open_store(backend, root=root, options={"read_only": True}) as store:
        assert store.count_leading(["k"]) == 0
        denied(lambda: store.write_block("k", b"data"), "k", root)
    assert [path.name for path in root.rglob("*") if not path.is_dir()] == ["link"]


@pytest.mark.root
def test_a_store_can_be_written_again_when_it_is_opened_anew(tmp_path: Path) -> None:
    """It was opened while its mount was read-only, and stays so until it is opened again."""
    with mounts.loop_filesystem("ext4", tmp_path, "-N", "2048") as root:
        fill(root, "block")
        with remounted(root.parent):
            store = kvio.open_store("hybrid", root=root)
        denied(lambda: store.write_block("k", b"data"), "k", root)
        store.close()
        with kvio.open_store("hybrid", root=root) as again:
            assert again.capabilities.writable
            assert again.write_block("k", b"data").nbytes == 4


@pytest.mark.root
@pytest.mark.slow
def test_the_command_reads_what_cannot_be_written(tmp_path: Path) -> None:
    """Each verb that only reads ends well; each that writes says in one line why it cannot."""
    pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
    key, data = next(iter(BLOCKS.items()))
    with mounts.loop_filesystem("ext4", tmp_path, "-N", "2048") as root:
        fill(root, "block")
        before = snapshot(root)
        with remounted(root.parent):
            assert cli.run("get", root, key).stdout == data
            reading: Sequence[Sequence[object]] = (
                ("stat", root, key),
                ("ls", root),
                ("ls", "-l", root, "d1/"),
                ("get", root, "d1/", tmp_path / "out", "--prefix"),
                ("verify", root, "d1/"),
                ("sweep", root, "--dry-run"),
                ("doctor", root),
                ("doctor", f"hybrid://{root}"),
                ("doctor", "--json", root),
            )
            for words in reading:
                done = cli.run(*words)
                assert done.returncode == 0, done
            assert b"read-only" in cli.run("doctor", root).stdout
            assert cli.run("verify", root).returncode == 1  # one block is damaged
            assert (tmp_path / "out" / "d1" / "k1").read_bytes() == BLOCKS["d1/k1"]
            writing: Sequence[Sequence[object]] = (
                ("put", root, "new", "/dev/null"),
                ("put", "-r", root, "new", tmp_path / "out"),
                ("rm", root, key),
                ("sweep", root),
                ("verify", root, "--delete-corrupt"),
                ("verify", root, "--quarantine", tmp_path / "quarantine"),
            )
            for words in writing:
                done = cli.run(*words)
                assert done.returncode == 2, done
                assert b"read-only" in done.stderr, done
                assert b"Traceback" not in done.stderr
            assert not (tmp_path / "quarantine").exists()
        assert snapshot(root) == before


@pytest.mark.root
def test_a_sealed_shared_file_on_a_read_only_mount_is_read(tmp_path: Path) -> None:
    """It needs nothing of its directory but to pass."""
    with mounts.loop_filesystem("ext4", tmp_path, "-N", "2048") as root:
        with kvio.SharedFile.create(root / "f", 5000, durability="visible") as file:
            file.pwrite(b"d" * 5000, 0)
            file.seal()
        with remounted(root.parent), kvio.SharedFile.open(root / "f") as opened:
            out = bytearray(5000)
            opened.pread_into(out, 0)
            assert out == b"d" * 5000


def test_blocks_in_memory_are_not_read_by_direct_io() -> None:
    """Tmpfs takes O_DIRECT and ignores it: a store that promises it does not open on it."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or filesystem_of(shm) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        root = Path(folder, "root")
        with kvio.open_store("posix-tmpfile", root=root, options={"create": True}) as store:
            store.write_block("k", b"data")
        with pytest.raises(kvio.UnsupportedError, match="posix-direct on"):
            kvio.open_store("posix-direct", root=root, options={"read_only": True})
        with kvio.open_store("hybrid", root=root, options={"read_only": True}) as store:
            assert bytes(store.read_block("k")) == b"data"
