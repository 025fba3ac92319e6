"""Stores on a real file system for the pytest-benchmark files.

    pytest benchmarks --benchmark-only                    measure
    pytest benchmarks --benchmark-disable                 smoke: every operation once
    KVIO_BENCH_DIR=/mnt/nvme pytest benchmarks            on another file system

Unlike bars.py these compare nothing: they show where the time of one operation goes from one
version to the next.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import kvio

OpenStore: TypeAlias = Callable[..., kvio.Store]


@pytest.fixture(scope="module")
def bench_directory() -> Iterator[Path]:
    """A directory on the file system to measure."""
    parent = os.environ.get("KVIO_BENCH_DIR", tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix="kvio-bench-", dir=parent))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def open_store(bench_directory: Path) -> Iterator[OpenStore]:
    """Open a store of a backend over a directory of its own."""
    stores: list[kvio.Store] = []

    def open_one(backend: str, **options: Any) -> kvio.Store:
        root = tempfile.mkdtemp(dir=bench_directory)
        try:
            store = kvio.open_store(backend, root=root, options=options)
        except kvio.UnsupportedError as exc:
            pytest.skip(f"direct I/O is missing here: {exc}")
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()
