"""Fresh, small file systems of several kinds, mounted for a while: root only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.harness.workers import wait_readable
from kvio import GiB, UnsupportedError

#: Every kind, in the order of tables, and what it is made of.
KINDS: Final = {
    "ext4": "ext4",
    "xfs": "xfs",
    "btrfs": "btrfs",
    "tmpfs": "tmpfs",
    "overlay": "overlay on ext4",
    "fuse": "fuse (bindfs on ext4)",
}
#: Room on each; images are sparse.
ROOM_BYTES: Final = GiB

_MAKERS: Final = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}
#: The Debian package of each program.
_PACKAGES: Final = {
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "losetup": "mount",
    "mount": "mount",
    "umount": "mount",
    "bindfs": "bindfs",
}
#: How long a FUSE daemon may take to end once its mount is gone.
_DAEMON_S: Final = 10.0


@contextmanager
def fresh_file_system(kind: str, work: Path, nbytes: int = ROOM_BYTES) -> Iterator[Path]:
    """Lend the root of a fresh file system of *nbytes* mounted below *work*, then unmount it.

    Raises:
        UnsupportedError: a right or a program is missing here, or one failed.
    """
    if os.geteuid():
        raise UnsupportedError("needs root, to mount")
    missing = [program for program in _needed(kind) if shutil.which(program) is None]
    if missing:
        raise UnsupportedError(f"needs {missing[0]} (Debian package {_PACKAGES[missing[0]]})")
    with ExitStack() as stack:
        point = _make(kind, work, nbytes, stack)
        root = point / "root"
        root.mkdir(mode=0o700)
        yield root


def _needed(kind: str) -> tuple[str, ...]:
    if kind == "tmpfs":
        return ("mount", "umount")
    maker = _MAKERS.get(kind, _MAKERS["ext4"])[0]
    return (maker, "losetup", "mount", "umount", *(["bindfs"] if kind == "fuse" else []))


def _make(kind: str, work: Path, nbytes: int, stack: ExitStack) -> Path:
    if kind == "tmpfs":
        command = ("mount", "-t", kind, "-o", f"size={nbytes},mode=0700", "kvio")
        return _mount(command, work / "mounted", stack)
    if kind in _MAKERS:
        return _loop(kind, work, nbytes, stack)
    below = _loop("ext4", work, nbytes, stack)
    for name in ("lower", "upper", "work"):
        (below / name).mkdir()
    if kind == "fuse":
        return _bindfs(below / "lower", work / kind, stack)
    layers = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
    return _mount(("mount", "-t", kind, "-o", layers, "kvio"), work / kind, stack)


def _loop(kind: str, work: Path, nbytes: int, stack: ExitStack) -> Path:
    """Mount an image file; the loop device reads and writes it direct, or nothing were cold."""
    image = work / "image"
    image.touch(mode=0o600)
    os.truncate(image, nbytes)
    _call((*_MAKERS[kind], str(image)))
    stack.callback(_detach, image)
    device = _call(("losetup", "--find", "--show", str(image))).strip()
    _call(("losetup", "--direct-io=on", device))
    return _mount(("mount", "-t", kind, device), work / "mounted", stack)


def _mount(command: Sequence[str], point: Path, stack: ExitStack) -> Path:
    point.mkdir(mode=0o700)
    stack.callback(_unmount, point)  # first: who is interrupted may have mounted
    _call((*command, str(point)))
    return point


def _bindfs(source: Path, point: Path, stack: ExitStack) -> Path:
    """Mount by a daemon, and wait for its end after unmounting, since it keeps *source* busy."""
    ended, held = os.pipe()
    stack.callback(os.close, ended)
    stack.callback(wait_readable, ended, _DAEMON_S)
    point.mkdir(mode=0o700)
    stack.callback(_unmount, point)
    try:
        _call(("bindfs", str(source), str(point)), keep=(held,))
    finally:
        os.close(held)
    return point


def _unmount(point: Path) -> None:
    """Unmount, for all processes that still look at it if need be."""
    with _interrupts_ignored():
        for command in (("umount",), ("umount", "--lazy")):
            if not subprocess.run((*command, point), capture_output=True, check=False).returncode:
                return


def _detach(image: Path) -> None:
    """Free every loop device of an image, and the image."""
    with _interrupts_ignored():
        listed = subprocess.run(
            ("losetup", "--noheadings", "--output", "NAME", "--associated", image),
            capture_output=True,
            text=True,
            check=False,
        )
        for device in listed.stdout.split():
            subprocess.run(("losetup", "--detach", device), capture_output=True, check=False)
        image.unlink()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Keep a second Ctrl-C from stopping the cleaning up after the first, also in children."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _call(command: Sequence[str], *, keep: Sequence[int] = ()) -> str:
    """Run a program that has to succeed; gives what it printed."""
    status, said, complaint = finish(command, keep)
    if status:
        raise UnsupportedError(f"{command[0]} ended with {status}: {complaint}")
    return said


def finish(command: Sequence[str], keep: Sequence[int] = ()) -> tuple[int, str, str]:
    """Run a program to its end; gives status, output and the beginning of what it complained.

    In a session of its own, so that Ctrl-C reaches it by way of this process alone.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=keep,
    ) as process:
        try:
            said, complaint = process.communicate()
        except BaseException:
            process.kill()
            process.wait()  # or it would keep the mount busy
            raise
    return process.returncode, said, " ".join(complaint.split())[:200]
