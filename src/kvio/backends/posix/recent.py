"""How far back a read counts as lately: what the page cache may still hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def reach_bytes() -> int:
    """Give half of the memory this process may use, the machine's or its control group's."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(_CGROUP_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        limit = memory
    return min(memory, limit) // 2
