"""Durable means synced, in the right order, or there is no receipt; or it is refused."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio._native import faults
from kvio.url import OptionValue
from tests.posix import children, faultlab, strace
from tests.posix.strace import where

PAYLOAD = faultlab.pattern(1, 9000)
SITES = faults.sites()
NEVER = 1 << 30


@pytest.fixture
def root(real_disk: Path) -> Path:
    """A root directory on a disk."""
    path = real_disk / "root"
    path.mkdir(mode=0o700)
    return path


@contextmanager
def counting() -> Iterator[Any]:
    """Count the calls of each site."""
    with faults.inject("read", nth=NEVER) as fault:
        yield fault


def calls(fault: Any, *sites: str) -> tuple[int, ...]:
    """How often each of *sites* was called."""
    return tuple(fault.seen[SITES[site]] for site in sites)


def durable(root: Path, **options: OptionValue) -> kvio.Store:
    """Open a durable store, with one directory for all keys."""
    try:
        return kvio.open_store(
            "posix-tmpfile", root=root, durability="durable", layout="plain", options=options
        )
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system is not durable: {exc}")


@pytest.fixture
def journaled_root(journaled_disk: Path) -> Path:
    """A root directory where durable blocks are synced before they have a name."""
    path = journaled_disk / "root"
    path.mkdir(mode=0o700)
    return path


# What is refused


def test_memory_is_not_durable() -> None:
    """Tmpfs refuses ``durable`` with the reason, and promises no more than ``visible``."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("needs a tmpfs on /dev/shm")
    root = Path(tempfile.mkdtemp(prefix="kvio-test-", dir=shm))
    try:
        with pytest.raises(kvio.UnsupportedError, match="tmpfs is memory"):
            kvio.open_store("posix-tmpfile", root=root, durability="durable")
        with kvio.open_store("posix-tmpfile", root=root) as store:
            assert not store.capabilities.durable_write
            assert any("durable" in note for note in store.capabilities.notes)
            assert store.write_block("k", b"data").level == "visible"
    finally:
        shutil.rmtree(root)


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "refused"), [("volatile", True), ("metacopy=off", False)], ids=["volatile", "not"]
)
def test_a_volatile_overlay_is_refused(real_disk: Path, options: str, refused: bool) -> None:  # noqa: FBT001  # a parameter
    """Overlayfs with ``volatile`` skips every fsync, so ``durable`` is refused there."""
    children.need_root()
    for name in ("lower", "upper", "work", "merged"):
        (real_disk / name).mkdir(mode=0o700)
    given = f"lowerdir={real_disk}/lower,upperdir={real_disk}/upper,workdir={real_disk}/work"
    command = ["mount", "-t", "overlay", "none", "-o", f"{given},{options}"]
    done = subprocess.run([*command, str(real_disk / "merged")], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"overlayfs cannot be mounted here: {done.stderr.strip()}")
    try:
        if refused:
            with pytest.raises(kvio.UnsupportedError, match="volatile"):
                kvio.open_store("posix-tmpfile", root=real_disk / "merged", durability="durable")
        else:
            with kvio.open_store(
                "posix-tmpfile", root=real_disk / "merged", durability="durable", layout="plain"
            ) as store:
                assert store.write_block("k", b"data").level == "durable"
    finally:
        subprocess.run(["umount", "-l", str(real_disk / "merged")], check=True)


# What a receipt says


@pytest.mark.parametrize("if_exists", ["keep", "replace", "error"])
def test_a_receipt_tells_the_level_that_was_reached(root: Path, if_exists: Any) -> None:
    """``visible`` stores sync nothing; ``durable`` ones sync bytes and name."""
    with counting() as fault, kvio.open_store("posix-tmpfile", root=root) as store:
        receipt = store.write_block("a", PAYLOAD, if_exists=if_exists)
        assert receipt.level == "visible"
        assert calls(fault, "fdatasync", "fsync_dir") == (0, 0)
    with durable(root) as store, counting() as fault:
        receipt = store.write_block("b", PAYLOAD, if_exists=if_exists)
        assert receipt.level == "durable"
        assert calls(fault, "fdatasync", "fsync_dir") == (1, 1)


def test_a_batch_shares_directory_syncs(journaled_root: Path) -> None:
    """Sixteen durable blocks of one directory cost sixteen data syncs and one directory sync."""
    items = [(f"k{i}", PAYLOAD) for i in range(16)]
    with durable(journaled_root) as store, counting() as fault:
        results = store.write_blocks(items)

    assert all(r.receipt is not None and r.receipt.level == "durable" for r in results)
    assert calls(fault, "fdatasync", "link", "fsync_dir") == (16, 16, 1)


def test_new_directories_are_made_durable_with_their_parents(root: Path) -> None:
    """A block three directories down syncs each parent that got a new name."""
    with durable(root) as store, counting() as fault:
        store.write_block("x/y/z/k", PAYLOAD)

    mkdir, fsync_dir = calls(fault, "mkdir", "fsync_dir")
    assert mkdir == 3
    assert fsync_dir >= 4


def test_a_deletion_is_made_durable(root: Path) -> None:
    """A durable store syncs the directory after unlinking, and reports when that fails."""
    with durable(root) as store:
        store.write_blocks([("a", PAYLOAD), ("b", PAYLOAD)])
        with counting() as fault:
            assert store.delete_block("a")
        assert calls(fault, "unlink", "fsync_dir") == (1, 1)
        with faults.inject("fsync_dir", error=errno.EIO), pytest.raises(kvio.StorageError):
            store.delete_block("b")


# Kept blocks


@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct"])
@pytest.mark.parametrize("nbytes", [9000, 700_001], ids=["small", "large"])
def test_a_kept_block_is_made_durable(root: Path, backend: str, nbytes: int) -> None:
    """A block that someone wrote without syncing is synced, bytes and name, before it is kept."""
    payload = faultlab.unaligned(faultlab.pattern(2, nbytes))
    options: dict[str, OptionValue] = {"segment_bytes": 131072, "chunk_bytes": 131072}
    try:
        with kvio.open_store(backend, root=root, options=options) as store:
            store.write_block("k", payload)
        store = kvio.open_store(backend, root=root, durability="durable", options=options)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    with store, counting() as fault:
        receipt = store.write_block("k", payload)

    assert receipt.existed
    assert receipt.level == "durable"
    data_syncs, directory_syncs = calls(fault, "fdatasync", "fsync_dir")
    assert data_syncs >= 1, "the bytes of the kept block were not synced"
    assert directory_syncs >= 1, "the name of the kept block was not synced"


@pytest.mark.parametrize(("site", "nth"), [("fdatasync", 1), ("read", 2), ("read", 3)])
def test_a_kept_block_in_doubt_is_written_anew(root: Path, site: str, nth: int) -> None:
    """If the existing block cannot be synced or read through, the caller's bytes replace it.

    Asking once more proves nothing: a second fdatasync after a failed one says OK.
    """
    kvio.open_store("posix-tmpfile", root=root).close()
    with durable_block_store(root) as store:
        store.write_block("k", PAYLOAD)
        before = faultlab.file_of(root, "k").stat().st_ino
        with faults.inject(site, nth=nth, error=errno.EIO):
            receipt = store.write_block("k", PAYLOAD)

    assert not receipt.existed
    assert faultlab.file_of(root, "k").stat().st_ino != before
    assert faultlab.peek(root, "k") == PAYLOAD


def test_a_kept_block_with_rotten_bytes_is_written_anew(root: Path) -> None:
    """A durable ``keep`` reads the existing block through: flipped bytes are replaced."""
    with durable_block_store(root) as store:
        store.write_block("k", PAYLOAD)
        path = faultlab.file_of(root, "k")
        rotten = bytearray(path.read_bytes())
        rotten[100] ^= 4
        path.write_bytes(rotten)
        receipt = store.write_block("k", PAYLOAD)

    assert not receipt.existed
    assert faultlab.peek(root, "k") == PAYLOAD


def durable_block_store(root: Path) -> kvio.Store:
    """Open a durable store of blocks with trailers."""
    try:
        return kvio.open_store("posix-tmpfile", root=root, durability="durable")
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system is not durable: {exc}")


# What fails


@pytest.mark.parametrize("publish", ["auto", "rename"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_no_name_without_synced_bytes(root: Path, publish: str, error: int) -> None:
    """If fdatasync goes on failing, nothing is linked or renamed, and there is no receipt."""
    with (
        durable(root, publish=publish) as store,
        faults.inject("fdatasync", error=error, times=NEVER) as fault,
        pytest.raises(kvio.StorageError) as caught,
    ):
        store.write_block("k", PAYLOAD)

    assert caught.value.errno == error
    assert calls(fault, "link", "rename", "fsync_dir") == (0, 0, 0)
    assert not (root / "k").exists()
    assert not faultlab.temporaries(root)


@pytest.mark.parametrize("site", ["write", "open_temp"])
def test_no_sync_without_bytes(root: Path, site: str) -> None:
    """If the bytes cannot be written, nothing is synced or linked."""
    with (
        durable(root) as store,
        faults.inject(site, error=errno.ENOSPC, times=NEVER) as fault,
        pytest.raises(kvio.StorageFullError),
    ):
        store.write_block("k", PAYLOAD)

    assert calls(fault, "fdatasync", "link", "fsync_dir") == (0, 0, 0)


def test_a_failed_link_syncs_no_directory(journaled_root: Path) -> None:
    """Without a name there is nothing to sync in the directory."""
    with (
        durable(journaled_root) as store,
        faults.inject("link", error=errno.ENOSPC, times=NEVER) as fault,
        pytest.raises(kvio.StorageFullError),
    ):
        store.write_block("k", PAYLOAD)

    assert calls(fault, "fdatasync", "fsync_dir") == (1, 0)


def test_a_failed_directory_sync_gives_no_receipt(root: Path) -> None:
    """The block may be visible, but its survival is unknown: an error, never a receipt."""
    with durable(root) as store:
        with (
            faults.inject("fsync_dir", error=errno.EIO),
            pytest.raises(kvio.StorageError) as caught,
        ):
            store.write_block("k", PAYLOAD)
        assert caught.value.errno == errno.EIO
        assert (root / "k").read_bytes() in (b"", PAYLOAD)
        assert store.write_block("k", PAYLOAD).level == "durable"


def test_a_failed_directory_sync_fails_every_block_of_that_directory(root: Path) -> None:
    """Blocks that share a failed directory sync share the failure; others do not."""
    items = [("a/1", PAYLOAD), ("b/1", PAYLOAD), ("a/2", PAYLOAD), ("b/2", PAYLOAD)]
    with durable(root) as store:
        store.write_blocks([("a/0", PAYLOAD), ("b/0", PAYLOAD)])
        with faults.inject("fsync_dir", error=errno.EIO) as fault:
            results = store.write_blocks(items)

    assert [result.status for result in results] == ["failed", "ok", "failed", "ok"]
    assert [result.receipt is None for result in results] == [True, False, True, False]
    assert calls(fault, "fsync_dir") == (2,)


@pytest.mark.parametrize("publish", ["auto", "rename"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_close_gives_no_receipt(root: Path, publish: str, error: int) -> None:
    """Where errors come as late as close (NFS), a new name goes again and nobody gets a receipt."""
    with kvio.open_store(
        "posix-tmpfile", root=root, layout="plain", options={"publish": publish}
    ) as store:
        store.write_block("standing", b"old")
        for key in ("new", "standing"):
            with (
                faults.inject("close", error=error),
                pytest.raises(kvio.StorageError) as caught,
            ):
                store.write_block(key, PAYLOAD, if_exists="replace")
            assert caught.value.errno == error

    assert not (root / "new").exists()
    assert (root / "standing").read_bytes() in (b"old", PAYLOAD)
    assert not faultlab.temporaries(root)


def test_bytes_that_failed_to_sync_are_written_anew(journaled_root: Path) -> None:
    """After one EIO the block goes to a fresh inode, which is synced and gets the name."""
    with durable(journaled_root) as store, faults.inject("fdatasync", error=errno.EIO) as fault:
        receipt = store.write_block("k", PAYLOAD)

    assert receipt.level == "durable"
    assert calls(fault, "open_temp", "fdatasync", "link") == (2, 2, 1)
    assert (journaled_root / "k").read_bytes() == PAYLOAD


# What the kernel sees

TRACED = "openat,pwritev2,pwritev,fdatasync,fsync,linkat,renameat2,close"
SCRIPT = """
import sys, kvio
store = kvio.open_store("posix-tmpfile", root=sys.argv[1], durability="durable", layout="plain")
open("/dev/null").close()
store.write_block("k", b"x" * 9000)
"""


def trace(root: Path, *options: str) -> list[str]:
    """Let a child write one durable block under strace; its system calls."""
    log = root.parent / "trace"
    command = strace.command(log, "-e", f"trace={TRACED}", *options)
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT, str(root)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    start = max(n for n, line in enumerate(lines) if '"/dev/null"' in line)
    return lines[start + 1 :]


def test_the_kernel_sees_the_publish_protocol(journaled_root: Path) -> None:
    """open(O_TMPFILE), write, fdatasync of that descriptor, linkat, fsync of the directory."""
    durable(journaled_root).close()
    lines = trace(journaled_root)

    opened = where(lines, r"openat\(.*O_TMPFILE")
    assert len(opened) == 1
    fd = lines[opened[0]].rsplit("= ", 1)[1]
    write = where(lines, rf"pwritev2?\({fd}, ")
    sync = where(lines, rf"fdatasync\({fd}\) *= 0")
    link = where(lines, r"linkat\(.*\"k\"")
    directory = where(lines, r"fsync\(\d+\) *= 0")
    assert len(sync) == len(link) == 1
    assert opened < write < sync < link
    assert link[0] < directory[-1]


def test_a_descriptor_that_failed_is_never_synced_again(journaled_root: Path) -> None:
    """After EIO from fdatasync that descriptor is closed; another inode is written and synced."""
    durable(journaled_root).close()
    lines = trace(journaled_root, "-e", "inject=fdatasync:error=EIO:when=1")

    syncs = where(lines, r"fdatasync\(")
    first, second = (lines[number] for number in syncs)
    assert "EIO" in first
    assert "= 0" in second
    failed = re.findall(r"fdatasync\((\d+)\)", first)[0]
    between = lines[syncs[0] : syncs[1]]
    closed = where(between, rf"close\({failed}\)")
    reopened = where(between, r"openat\(.*O_TMPFILE")
    assert closed
    assert reopened
    assert closed[0] < reopened[0]
    assert (journaled_root / "k").read_bytes() == b"x" * 9000


def test_a_fallback_to_a_named_temporary_is_synced(journaled_root: Path) -> None:
    """A durable block whose file cannot be linked is written anew, and the new file is synced."""
    with (
        durable(journaled_root) as store,
        faults.inject("link", error=errno.ENOENT, times=2) as fault,
    ):
        receipt = store.write_block("k", PAYLOAD)

    assert receipt.level == "durable"
    assert faultlab.peek(journaled_root, "k", layout="plain") == PAYLOAD
    assert calls(fault, "open_temp", "fdatasync") == (2, 2)


def test_every_directory_of_a_fan_out_is_synced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 256 directories of a durable store are synced in their parents, and those in the root."""
    synced, fsync = set(), os.fsync

    def noting(fd: int) -> None:
        fsync(fd)
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", noting)
    try:
        kvio.open_store("posix-tmpfile", root=root, durability="durable").close()
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system is not durable: {exc}")

    assert synced >= {str(root), *(f"{root}/{number:x}" for number in range(16))}
