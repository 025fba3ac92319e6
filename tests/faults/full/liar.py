"""A kvio that takes no heed of what a full file system says: the harness must not trust it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.faults import mutants

VARIABLE: Final = "KVIO_LIAR"
#: Broken at the write, on a device that says so at once.
EARLY: Final = {
    "short_is_whole": "a short write is taken for a whole one",
    "full_is_whole": "a write that failed is taken for a whole one",
}
#: Broken afterwards, on a file system that says so late.
LATE: Final = {
    "sync_is_fine": "a sync that failed is taken for one that did not",
    "close_is_fine": "a close that failed is taken for one that did not",
}


def build(directory: Path) -> Path:
    """Compile the library; skip where there is no compiler."""
    source = Path(__file__).with_name("liar.c")
    return mutants.compile_c(source, directory / "liar.so", "-shared", "-fPIC")


def environment(library: Path, variant: str) -> dict[str, str]:
    """Return what the environment of a process needs beside the rest."""
    assert variant in EARLY or variant in LATE
    preload = f"{library}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    return {VARIABLE: variant, "LD_PRELOAD": preload}
