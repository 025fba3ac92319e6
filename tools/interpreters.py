"""The Pythons of this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def interpreters(versions: Iterable[str]) -> dict[str, str]:
    """Find the Pythons of some versions, and the running one, that can make environments."""
    found = {}
    for version in (*versions, current()):
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
        on_path = shutil.which(f"python{version}")
        own = [sys.executable] if version == current() else []
        for candidate in (*([on_path] if on_path else []), *map(str, pyenv), *own):
            if version not in found and is_python(candidate, version):
                found[version] = candidate
    return found


def current() -> str:
    """Name the running Python as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def order(version: str) -> tuple[int, ...]:
    """Sort 3.9 before 3.11."""
    return tuple(map(int, version.split(".")))


def is_python(path: str, version: str) -> bool:
    """Return whether this is a working Python of this version, with venv and pip, and no shim."""
    code = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        run = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return run.stdout.strip() == version
