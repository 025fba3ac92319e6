"""What a measurement was made on: machine, software, file system. Read from /proc and /sys."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from kvio.filesystem.probe import is_journaled

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A host and the software a measurement ran with.

    Attributes:
        load_average: before the first trial.
        load_of_others: other programs' runnable tasks per processor, the mean over all trials.
    """

    processor: str
    processors_usable: int
    memory_bytes: int
    kernel: str
    python: str
    kvio: str
    numpy: str
    load_average: tuple[float, float, float]
    utc: str
    load_of_others: float = 0.0

    def lines(self) -> list[str]:
        """Return it as text for a reader."""
        gib = self.memory_bytes / (1 << 30)
        return [
            f"machine      {self.processor}, {self.processors_usable} usable processors, "
            f"{gib:.1f} GiB, load {self.load_average[0]:.1f} at the start, "
            f"{self.load_of_others:.2f} per processor by other programs",
            f"software     Linux {self.kernel}, Python {self.python}, kvio {self.kvio}, "
            f"numpy {self.numpy}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The mounted file system a path is on.

    Attributes:
        device: what is mounted, with the kind of disk where the kernel tells.
        options: of the mount and of the file system, as the kernel lists them.
    """

    path: str
    kind: str
    device: str
    mount_point: str
    options: str
    free_bytes: int

    @property
    def is_memory(self) -> bool:
        """It keeps its files in memory."""
        return self.kind in MEMORY_FILE_SYSTEMS

    def lines(self) -> list[str]:
        """Return it as text for a reader."""
        free = self.free_bytes / (1 << 30)
        return [
            f"file system  {self.kind} on {self.device}, {free:.1f} GiB free",
            f"mounted at   {self.mount_point} ({self.options})",
        ]


def describe_machine() -> Machine:
    """Describe this host now."""
    return Machine(
        processor=_processor(),
        processors_usable=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=platform.release(),
        python=platform.python_version(),
        kvio=importlib.metadata.version("kvio"),
        numpy=importlib.metadata.version("numpy"),
        load_average=os.getloadavg(),
        utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def describe_file_system(path: Path) -> FileSystem:
    """Describe the file system of an existing path; what cannot be known is "unknown"."""
    resolved = path.resolve()
    device = os.stat(resolved).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mount = _mount(resolved, _read("/proc/self/mountinfo"))
    return FileSystem(
        path=str(resolved),
        kind=mount[0],
        device=mount[1] + _disk(number),
        mount_point=mount[2],
        options=mount[3],
        free_bytes=shutil.disk_usage(resolved).free,
    )


def runnable_tasks() -> int:
    """Count the tasks of this machine that run or wait for a processor now: proc(5), loadavg."""
    return int(_read("/proc/loadavg").split()[3].partition("/")[0])


def creates_slowly(path: Path) -> bool:
    """Report whether a directory is on an ext4 without a journal.

    It gives no inode out again for some minutes after it was deleted, and every creation steps over
    all of them (fs/ext4/ialloc.c, recently_deleted).
    """
    if describe_file_system(path).kind != "ext4":
        return False
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not is_journaled(root)
    finally:
        os.close(root)


def _mount(path: Path, mountinfo: str) -> tuple[str, str, str, str]:
    """Find the last mount with the longest mount point above *path*: see proc(5), mountinfo."""
    best = ("unknown", "unknown", "", "unknown")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = _unescaped(before.split()[4])
        kind, source, super_options = (*after.split(), "")[:3]
        if path.is_relative_to(point) and len(point) >= len(best[2]):
            best = (kind, _unescaped(source), point, f"{before.split()[5]},{super_options}")
    return best


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _disk(number: str) -> str:
    rotational = _read(f"/sys/dev/block/{number}/queue/rotational").strip()
    if not rotational:  # a partition: the queue belongs to the disk above it
        rotational = _read(f"/sys/dev/block/{number}/../queue/rotational").strip()
    return {"0": " (reported not rotational)", "1": " (reported rotational)"}.get(rotational, "")


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
