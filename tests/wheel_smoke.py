"""Stores a block with an installed kvio on each backend; run by the nox session ``wheel``."""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import kvio


def says_what_to_install(name: str) -> None:
    """Open an S3 store where none of the libraries is installed."""
    try:
        kvio.open_store(f"{name}://bucket")
    except kvio.MissingDependencyError as exc:
        assert "pip install 'kvio[s3-" in str(exc), exc  # noqa: PT017  # there is no pytest here
    else:
        raise AssertionError(name)


def keeps_a_block(name: str) -> None:
    """Write a block to a directory and read it back."""
    data = bytes(range(256)) * 4096
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as root:
        try:
            store = kvio.open_store(name, root=None if name == "memory" else root)
        except kvio.UnsupportedError as exc:
            print(f"{name}: not on this file system: {exc}")
            return
        with store:
            assert store.write_block("a/block", data).nbytes == len(data)
            assert store.read_block("a/block") == data


for backend in sorted(kvio.backend_names()):
    (says_what_to_install if backend.startswith("s3") else keeps_a_block)(backend)
print(f"kvio {version('kvio')} on Python {sys.version.split()[0]}: {kvio.backend_names()}")
