"""Stores a block with an installed kvio on each backend; run by the nox session ``wheel``."""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import kvio

data = bytes(range(256)) * 4096
for name in sorted(kvio.backend_names()):
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as root:
        try:
            store = kvio.open_store(name, root=None if name == "memory" else root)
        except kvio.UnsupportedError as exc:
            print(f"{name}: not on this medium: {exc}")
            continue
        with store:
            assert store.write_block("a/block", data).nbytes == len(data)
            assert store.read_block("a/block") == data
print(f"kvio {version('kvio')} on Python {sys.version.split()[0]}: {kvio.backend_names()}")
