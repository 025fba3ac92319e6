"""What a root lies on decides what ``durable`` may promise, and how durable blocks are published.

An ext4 without a journal and an ext2 write names and inodes in any order; memory below an overlay
or a loop device loses everything. tests/faults/blocks cuts the power of the first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.diagnostics.doctor import diagnose
from kvio.filesystem.sysfs import tree_at
from kvio.placement.devices import locate_path
from kvio.types import Finding
from tests.posix import children, faultlab, mounts, strace
from tests.posix.strace import where

pytestmark = pytest.mark.root
NAMED = "named temporary, rename"
OLD, NEW = b"old bytes", b"new bytes, which are longer"


def durable(root: Path, **options: str | bool) -> kvio.Store:
    """Open a durable store."""
    return kvio.open_store(
        "posix-tmpfile", root=root, durability="durable", layout="plain", options=options
    )


def durable_finding(root: Path) -> Finding:
    """Return what the doctor says of durable writes."""
    return next(one for one in diagnose(str(root)).findings if one.name == "durable writes")


# Without a journal


@pytest.fixture(params=["ext4-nojournal", "ext2"])
def unjournaled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a file system without a journal; its root."""
    with mounts.loop_filesystem(request.param, tmp_path) as root:
        yield root


def test_durable_blocks_have_a_name_when_they_are_synced(unjournaled: Path) -> None:
    """There the sync of a directory writes no inode, so a file linked after its sync is lost."""
    with kvio.open_store("posix-tmpfile", root=unjournaled) as visible:
        assert visible.capabilities.publish.startswith("O_TMPFILE")
    with durable(unjournaled) as store:
        notes = " ".join(store.capabilities.notes)
        assert store.capabilities.publish == NAMED
        assert store.write_block("a", OLD).level == "durable"

    assert "without a journal" in notes
    assert "e2fsck" in durable_finding(unjournaled).meaning
    with pytest.raises(kvio.UnsupportedError, match="leave publish to kvio"):
        durable(unjournaled, publish="tmpfile")


def test_a_journal_that_cannot_be_seen_counts_as_none(tmp_path: Path) -> None:
    """Without /sys a durable block has a name when it is synced, on any ext4."""

    def work() -> str:
        children.hide("/sys")
        with durable(root) as store:
            return f"{store.capabilities.publish}: {' '.join(store.capabilities.notes)}"

    with mounts.loop_filesystem("ext4", tmp_path) as root:
        with durable(root) as store:
            assert store.capabilities.publish.startswith("O_TMPFILE")
        said = children.in_child(work)

    assert said.startswith(NAMED)
    assert "whose journal is not visible" in said


@pytest.mark.parametrize("way", ["block", "batch", "large"])
def test_a_replaced_block_keeps_a_name_until_the_directory_is_synced(
    unjournaled: Path, way: str
) -> None:
    """A writer that dies before the sync leaves the old block under the name of a temporary."""
    new = NEW * 300_000 if way == "large" else NEW

    def replace() -> None:
        with (
            durable(unjournaled, segment_bytes="1MiB") as store,
            faults.inject("fsync_dir", error=faults.KILL),
        ):
            if way == "batch":
                store.write_blocks([("k", new)], if_exists="replace")
            else:
                store.write_block("k", new, if_exists="replace")

    with durable(unjournaled) as store:
        store.write_block("k", OLD)
    inode = (unjournaled / "k").stat().st_ino
    children.killed(replace)
    (left,) = faultlab.temporaries(unjournaled)

    assert (unjournaled / "k").read_bytes() == new
    assert left.read_bytes() == OLD
    assert left.stat().st_ino == inode
    with durable(unjournaled) as store:
        store.write_block("k", OLD, if_exists="replace")
        assert faultlab.temporaries(unjournaled) == [left]
        assert store.sweep() == [str(left)]


def test_a_deleted_block_is_held_until_the_directory_is_synced(
    unjournaled: Path, tmp_path: Path
) -> None:
    """Its inode becomes no other file's while a power cut can bring the name back."""
    with durable(unjournaled) as store:
        store.write_block("k", OLD)
    log = tmp_path / "trace"
    program = f"""
import kvio
with kvio.open_store(
    "posix-tmpfile", root={str(unjournaled)!r}, durability="durable", layout="plain"
) as store:
    open("/dev/null").close()
    store.delete_block("k")
"""
    command = strace.command(log, "-e", "trace=openat,unlinkat,fsync,close")
    subprocess.run([*command, sys.executable, "-c", program], check=True)
    lines = log.read_text().splitlines()
    lines = lines[max(where(lines, '"/dev/null"')) :]
    (held,) = where(lines, r'openat\(.*"k", .*O_PATH')
    fd = lines[held].rsplit("= ", 1)[1]
    (unlinked,) = where(lines, r'unlinkat\(.*"k"')
    synced = min(number for number in where(lines, r"fsync\(\d+\)") if number > unlinked)
    closed = min(number for number in where(lines, rf"close\({fd}\)") if number > held)

    assert held < unlinked < synced < closed


def test_a_directory_that_has_the_key_s_name_is_not_moved(unjournaled: Path) -> None:
    """A block cannot take the place of a directory, and the directory stays where it is."""
    with durable(unjournaled) as store:
        store.write_block("a/b", OLD)
        with pytest.raises(kvio.StorageError):
            store.write_block("a", NEW, if_exists="replace")

        assert bytes(store.read_block("a/b")) == OLD
    assert not faultlab.temporaries(unjournaled)


def test_a_replaced_shared_file_keeps_a_name_until_the_directory_is_synced(
    unjournaled: Path,
) -> None:
    """A seal that dies before the sync leaves the old file, which `recover` removes."""
    path = unjournaled / "file"

    def write(data: bytes) -> None:
        with kvio.SharedFile.create(path, len(data), if_exists="replace") as file:
            file.pwrite(data, 0)
            file.seal()

    def replace() -> None:
        with faults.inject("fsync_dir", error=faults.KILL):
            write(NEW)

    write(OLD)
    children.killed(replace)

    assert path.read_bytes().startswith(NEW)
    assert (unjournaled / ".file.kvio-data").read_bytes().startswith(OLD)
    kvio.SharedFile.recover(path).close()
    assert path.read_bytes().startswith(NEW)
    assert os.listdir(unjournaled) == ["file"]


# Memory below


@contextmanager
def overlay(upper: Path, work: Path) -> Iterator[Path]:
    """Mount an overlay whose upper directory is below *upper*."""
    for name in ("upper", "work"):
        (upper / name).mkdir(mode=0o700)
    for name in ("lower", "merged"):
        (work / name).mkdir(mode=0o700)
    given = f"lowerdir={work}/lower,upperdir={upper}/upper,workdir={upper}/work"
    merged = work / "merged"
    command = ["mount", "-t", "overlay", "none", "-o", given, str(merged)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"overlayfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield merged
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)


def test_an_overlay_on_memory_is_refused_by_all(tmp_path: Path) -> None:
    """A store, a shared file, the doctor and placement give one answer."""
    with (
        mounts.memory_filesystem(tmp_path, "size=8m") as memory,
        overlay(memory, tmp_path) as root,
    ):
        refused_by_all(root, "tmpfs, which is memory")
        assert "tmpfs is memory" in locate_path(tree_at("/"), str(root)).why


def test_a_loop_device_on_memory_is_refused_by_all(tmp_path: Path) -> None:
    """An ext4 whose disk is a file on tmpfs is gone with the power."""
    with (
        mounts.memory_filesystem(tmp_path, "size=32m") as memory,
        mounts.loop_filesystem("ext4", memory) as root,
    ):
        refused_by_all(root, "tmpfs, which is memory")


def refused_by_all(root: Path, reason: str) -> None:
    """Check that nothing here promises durable, and that trust_fsync overrides."""
    with pytest.raises(kvio.UnsupportedError, match=reason) as caught:
        durable(root)
    assert "trust_fsync=true overrides" in str(caught.value)
    with pytest.raises(kvio.ConfigError, match=reason):
        kvio.SharedFile.create(root / "file", 10)
    finding = durable_finding(root)
    assert not finding.good
    assert reason in finding.meaning
    with durable(root, trust_fsync=True) as store:
        assert store.write_block("k", OLD).level == "durable"
        assert any("trust_fsync=true" in note for note in store.capabilities.notes)


def test_an_overlay_on_a_disk_is_durable(real_disk: Path) -> None:
    """What is below can be seen and is no memory: there is nothing to note."""
    children.need_root()
    with overlay(real_disk, real_disk) as root, durable(root) as store:
        assert store.write_block("k", OLD).level == "durable"
        assert not any("not visible" in note for note in store.capabilities.notes)


def test_what_a_container_hides_is_noted(real_disk: Path) -> None:
    """Durable is promised where the upper directory is out of sight, and the notes name it."""
    children.need_root()

    def work() -> str:
        children.hide(upper)
        with durable(root) as store:
            assert store.write_block("k", OLD).level == "durable"
            assert store.capabilities.publish == NAMED
            return " ".join(store.capabilities.notes)

    with ExitStack() as stack:
        upper = real_disk / "below"
        upper.mkdir()
        root = stack.enter_context(overlay(upper, real_disk))
        said = children.in_child(work)

    assert f"the upper directory {upper}/upper is not visible here" in said
