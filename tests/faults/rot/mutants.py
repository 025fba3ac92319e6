"""A C core with readers that look past something, compiled once; a variable chooses which."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]
VARIABLE: Final = "KVIO_TEST_MUTANT"
#: What each broken reader does: file, what stands there, and what it becomes. ``MUTANT(n)`` is
#: true where the n-th was chosen.
MUTANTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "checks the length only": (
        "read.c",
        "if (call->verify == KVIO_VERIFY_FULL && trailer->flags & KVIO_CHECKSUM &&",
        "if (!MUTANT(0) && call->verify == KVIO_VERIFY_FULL && trailer->flags & KVIO_CHECKSUM &&",
    ),
    "skips the trailer's checksum": (
        "trailer.c",
        "if (verify != KVIO_VERIFY_OFF && kvio_crc32c(0, in, 60)",
        "if (!MUTANT(1) && verify != KVIO_VERIFY_OFF && kvio_crc32c(0, in, 60)",
    ),
    "skips the hash of the key": (
        "trailer.c",
        "if (verify != KVIO_VERIFY_OFF && memcmp(in + 24, key_hash, 16))",
        "if (!MUTANT(2) && verify != KVIO_VERIFY_OFF && memcmp(in + 24, key_hash, 16))",
    ),
    "trusts a range": (
        "read.c",
        "call->flags & KVIO_TRAILER ? kvio_load_trailer(call, op, &trailer) : 0;",
        "call->flags & KVIO_TRAILER && !MUTANT(3) ? kvio_load_trailer(call, op, &trailer) : 0;",
    ),
    "trusts where the end should be": (
        "trailer.c",
        "if (out->nbytes > room || room - out->nbytes >= KVIO_MAX_ALIGN)",
        "if (!MUTANT(4) && (out->nbytes > room || room - out->nbytes >= KVIO_MAX_ALIGN))",
    ),
}
_DEFINITION: Final = f"""
#include <stdlib.h>
static int kvio_mutant_is(int number)
{{
	const char *chosen = getenv("{VARIABLE}");

	return chosen && atoi(chosen) == number;
}}
#define MUTANT(number) kvio_mutant_is(number)
"""


def build(folder: Path) -> Path:
    """Return a directory from which a Python imports kvio with the broken readers in it."""
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "cc", "gcc"))):
        pytest.skip("no C compiler to build broken readers with (Debian: gcc)")
    pytest.importorskip("setuptools", "77", reason="setuptools is too old to build with, or absent")
    ignore = shutil.ignore_patterns("*.so", "_core.c", "__pycache__")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    native = folder / "src/kvio/_native"
    for name in dict.fromkeys(file for file, _, _ in MUTANTS.values()):
        source = native / name
        text = source.read_text()
        for file, old, new in MUTANTS.values():
            if file == name:
                assert text.count(old) == 1, f"{name} has changed: {old!r}"
                text = text.replace(old, new)
        include = '#include "transfer.h"\n' if "transfer.h" in text else '#include "kvio.h"\n'
        source.write_text(text.replace(include, include + _DEFINITION))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "CFLAGS": "-O0 -w"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    return folder / "src"


def run(source: Path, module: str, number: int | None, *arguments: str) -> str:
    """Run a module of the tests on one broken reader, or on none; what it printed."""
    chosen = {} if number is None else {VARIABLE: str(number)}
    path = os.pathsep.join([str(source), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=source,
        env={**os.environ, "PYTHONPATH": path, **chosen},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout
