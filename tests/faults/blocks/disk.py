"""Real file systems over a disk that keeps a log and fails on request."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from tests.faults import mutants
from tests.faults.blocks import kernel
from tests.posix import children

_SOURCE: Final = Path(__file__).with_name("faultdisk.c")


@dataclass(frozen=True, slots=True)
class _World:
    """A kind of file system, as it is made and mounted.

    Attributes:
        program: the maker's command line, without the image.
        size_mib: of the image: the smallest, or nearly.
        package: the Debian package of the maker.
        type: what mount(2) calls it.
        options: replayed images have the UUID of the first; threads that zero inode tables cost
            time.
        small: added for blocks that are smaller than a page, as mkfs.ext4 makes them on small
            disks.
        repaired: has no journal: a machine checks it (``e2fsck -y``) before it mounts it again.
    """

    program: tuple[str, ...]
    size_mib: int
    package: str
    type: str
    options: str
    small: tuple[str, ...] = ()
    repaired: bool = False


_EXT: Final = ("-q", "-F", "-N", "2048", "-b", "4096")
_SMALL: Final = ("-b", "1024")
_WORLDS: Final = {
    "ext4": _World(("mkfs.ext4", *_EXT), 32, "e2fsprogs", "ext4", "noinit_itable", _SMALL),
    "ext4-nojournal": _World(
        ("mkfs.ext4", *_EXT, "-O", "^has_journal"),
        32,
        "e2fsprogs",
        "ext4",
        "noinit_itable",
        _SMALL,
        repaired=True,
    ),
    "ext2": _World(("mkfs.ext2", *_EXT), 32, "e2fsprogs", "ext2", "", _SMALL, repaired=True),
    "xfs": _World(("mkfs.xfs", "-q", "-f", "-K"), 300, "xfsprogs", "xfs", "nouuid"),
    "btrfs": _World(("mkfs.btrfs", "-q", "-f"), 128, "btrfs-progs", "btrfs", "nodiscard"),
    "ext3": _World(("mkfs.ext3", *_EXT), 32, "e2fsprogs", "ext3", "", _SMALL),
    "ext4-writeback": _World(
        ("mkfs.ext4", *_EXT), 32, "e2fsprogs", "ext4", "noinit_itable,data=writeback", _SMALL
    ),
    "ext4-nodelalloc": _World(
        ("mkfs.ext4", *_EXT), 32, "e2fsprogs", "ext4", "noinit_itable,nodelalloc", _SMALL
    ),
}
#: Where every test of this folder runs.
FILESYSTEMS: Final = ("ext4", "xfs", "btrfs")
#: Where power is cut in every run, and where in all of the campaign alone.
CUT: Final = ("ext4", "ext4-nojournal", "ext2", "xfs", "btrfs")
CUT_TOO: Final = ("ext3", "ext4-writeback", "ext4-nodelalloc")


def need(kind: str) -> None:
    """Skip where a file system of this kind cannot be made and mounted."""
    children.need_root()
    world = _WORLDS[kind]
    program = world.program[0]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program} (Debian package {world.package})")
    known = Path("/proc/filesystems").read_text().split()
    if world.type not in known:
        pytest.skip(f"this kernel has no {world.type}")
    if reason := _cannot_mount():
        pytest.skip(f"cannot mount loop devices in a namespace here: {reason}")


@cache
def _cannot_mount() -> str:
    """Try it in a child; why not, or an empty string."""

    def work() -> str:
        with tempfile.TemporaryDirectory(prefix="kvio-test-") as directory:
            try:
                kernel.own_namespace()
                kernel.mount("none", directory, "tmpfs", "size=1m")
                _mount_zeros(directory)
            except OSError as exc:
                return str(exc)
            finally:
                with suppress(OSError):
                    kernel.unmount(directory, detach=True)
        return ""

    return children.in_child(work)


def _mount_zeros(directory: str) -> None:
    """Mount what is no file system: refused for that (EINVAL) by a kernel that lets us mount."""
    image, root = f"{directory}/image", f"{directory}/root"
    os.mkdir(root)
    with open(image, "wb") as file:
        file.truncate(1 << 16)
    loop, device = kernel.attach(image)
    try:
        kernel.mount(device, root, "ext4")
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    finally:
        os.close(loop)


def build(directory: Path) -> Path:
    """Compile the disk's server; skip where that or FUSE cannot be."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs FUSE (/dev/fuse)")
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config (Debian package pkg-config)")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False
    )
    if flags.returncode:
        pytest.skip("needs libfuse 3 (Debian packages libfuse3-dev and fuse3)")
    return mutants.compile_c(_SOURCE, directory / "faultdisk", *flags.stdout.split())


def make(kind: str, image: str, *, small: bool = False) -> None:
    """Make a file system in a new file; *small*: of small blocks, where it has any."""
    world = _WORLDS[kind]
    with open(image, "wb") as file:
        file.truncate(world.size_mib << 20)
    more = world.small if small else ()
    subprocess.run([*world.program, *more, image], check=True, capture_output=True)


def mount(kind: str, device: str, root: str) -> None:
    """Mount a file system of ours; raises OSError."""
    world = _WORLDS[kind]
    if world.type == "btrfs":
        kernel.forget_btrfs()
    kernel.mount(device, root, world.type, world.options)


def repair(kind: str, device: str) -> str:
    """Check a file system without a journal, as a machine does when it starts after a power cut.

    Return what went wrong, or an empty string.
    """
    if not _WORLDS[kind].repaired:
        return ""
    done = subprocess.run(
        ["e2fsck", "-f", "-y", device], capture_output=True, text=True, check=False
    )
    # 1: errors were corrected (e2fsck(8)); what is larger, 2 (restart the system) aside, is none.
    return "" if done.returncode < 4 else f"e2fsck ended with {done.returncode}: {done.stdout}"


class Disk:
    """A mounted file system, at ``root``, whose disk keeps a log and fails on request.

    To be made in a namespace of its own (`kernel.own_namespace`), which cleans up after a crash.

    Attributes:
        root: where the file system is mounted.
        log: path of the log.
        mark_path: a file; what is written to it becomes a mark.
    """

    def __init__(self, kind: str, image: str, work: str, server: str) -> None:
        self.kind, self.image = kind, image
        self.root, self._fuse = f"{work}/root", f"{work}/disk"
        self.log = f"{work}/log"
        self.mark_path = f"{self._fuse}/mark"
        self._server = server
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for path in (self.root, self._fuse):
                os.makedirs(path, exist_ok=True)
            self._serve(stack)
            loop, self.device = kernel.attach(f"{self._fuse}/disk")
            stack.callback(os.close, loop)
            self._loop = loop
            mount(self.kind, self.device, self.root)
            stack.callback(self.unmount)
            self._control = os.open(f"{self._fuse}/control", os.O_WRONLY)
            stack.callback(os.close, self._control)
            self._stack = stack.pop_all()
        return self

    def _serve(self, stack: ExitStack) -> None:
        command = [self._server, self.image, self.log, self._fuse, "-f", "-s"]
        server: subprocess.Popen[Any] = subprocess.Popen(command, stdout=subprocess.PIPE)
        stack.callback(self._end, server)
        assert server.stdout is not None
        said = server.stdout.readline()
        assert said == b"ready\n", "the disk's server did not start"

    def _end(self, server: subprocess.Popen[Any]) -> None:
        kernel.unmount(self._fuse, detach=True)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if server.stdout is not None:
            server.stdout.close()

    def send(self, command: str) -> None:
        """Let the disk fail, or heal; see faultdisk.c."""
        os.write(self._control, command.encode())

    def mark(self, text: bytes) -> None:
        """Write a mark into the log."""
        fd = os.open(self.mark_path, os.O_WRONLY)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Unmount the file system, if it is mounted."""
        try:
            kernel.unmount(self.root)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise

    def remount(self) -> None:
        """Unmount, forget what is cached, and mount again: what is read then is on the disk."""
        self.unmount()
        kernel.forget_buffers(self._loop)
        mount(self.kind, self.device, self.root)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
