"""The memory limit of this process: the machine's memory, or that of its control group.

Linux allocates more memory than there is and kills a process when the pages are touched (the OOM
killer), so allocations that can never fit must be refused here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from kvio.filesystem.sysfs import Tree

_SYSTEM: Final = Tree("/")
_UNLIMITED: Final = 1 << 63


def ram_bytes(tree: Tree = _SYSTEM) -> int:
    """Return the bytes of RAM that this process can use: all, or the limit of its control group."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = _meminfo(tree, "MemTotal", installed)
    return min(total, *_limits(tree, "memory.max", "memory.limit_in_bytes"))


def most_bytes(tree: Tree = _SYSTEM) -> int:
    """Return the bytes of RAM and swap that this process can use."""
    swap = min(_meminfo(tree, "SwapTotal", 0), *_limits(tree, "memory.swap.max"))
    return ram_bytes(tree) + swap


def _meminfo(tree: Tree, name: str, otherwise: int) -> int:
    """Read a line of /proc/meminfo, which is in KiB."""
    for line in (tree.text("/proc/meminfo") or "").splitlines():
        field, _, value = line.partition(":")
        if field == name:
            return int(value.split()[0]) << 10
    return otherwise


def _limits(tree: Tree, unified: str, legacy: str | None = None) -> Iterator[int]:
    """Yield the limits of this process's control groups, of versions 2 and 1.

    A container may see its own group as the root, or a path of the host that does not exist here.
    """
    yield _UNLIMITED
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root, name = "/sys/fs/cgroup", unified
        elif legacy is not None and "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", legacy
        else:
            continue
        groups = [group for group in path.split("/") if group]
        for depth in range(len(groups) + 1):
            value = (tree.text("/".join((root, *groups[:depth], name))) or "").strip()
            if value.isdecimal():
                yield int(value)
