"""Looking at a program's system calls with strace (Debian package strace)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def command(log: Path, *options: str) -> list[str]:
    """Return the prefix of a command that logs a program's calls; skip where there is none."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace (Debian package strace)")
    tried = subprocess.run(
        ["strace", "-qq", "-o", os.devnull, "true"], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"strace is not allowed to trace here: {tried.stderr.strip():.200}")
    return ["strace", "-f", "-o", str(log), *options]


def where(lines: Sequence[str], pattern: str) -> list[int]:
    """Find the lines that match."""
    return [number for number, line in enumerate(lines) if re.search(pattern, line)]
