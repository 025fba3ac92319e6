"""Publish protocols that are broken on purpose: a harness that does not catch them proves nothing.

A small library, compiled for the test and preloaded into a child process, leaves out or repeats
the calls that make a block durable. Needs a C compiler (Debian packages gcc and libc6-dev).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

#: Names the variant to the library.
VARIABLE: Final = "KVIO_MUTANT"
#: What is broken, by the variant's name: these lose what had a receipt, or tear it.
MUTANTS: Final = {
    "no_directory_sync": "the file is synced, its directory is not: the name may be lost",
    "no_file_sync": "the directory is synced, the file is not: a name over nothing",
    "rename_without_sync": "a named temporary is renamed without a sync of its bytes",
    "no_sync": "neither the file nor its directory is synced",
    "retry_failed_sync": "a sync that failed is made again, and its second answer trusted",
}
#: Keep their receipts, because the sync of an inode commits the journal that has its name; what is
#: torn is a name that has none yet, when somebody else's sync commits that journal before.
UNTOLD: Final = {
    "link_before_sync": "the file is linked, or renamed, then synced, then its directory",
}
_SOURCE: Final = Path(__file__).with_name("mutant.c")
_FLAGS: Final = ("-O1", "-g", "-Wall", "-Wextra", "-Wconversion", "-Werror")


def build(directory: Path) -> Path:
    """Compile the library below *directory*; skip where there is no compiler."""
    return compile_c(_SOURCE, directory / "mutant.so", "-shared", "-fPIC")


def compile_c(source: Path, target: Path, *more: str) -> Path:
    """Compile one C file of the tests; skip where there is no compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler (Debian packages gcc and libc6-dev)")
    command = [compiler, *_FLAGS, "-o", str(target), str(source), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{source.name} does not compile:\n{done.stderr}"
    return target


def environment(library: Path | str, variant: str) -> dict[str, str]:
    """Return what a child's environment needs, beside the rest of it, to run broken."""
    assert variant in {**MUTANTS, **UNTOLD}, f"no such variant: {variant}"
    preload = f"{library}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    return {VARIABLE: variant, "LD_PRELOAD": preload}
