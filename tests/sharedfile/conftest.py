"""Shared files for tests: made in a fresh directory, closed at the end, and nothing left open."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvio import SharedFile

from . import raw

#: Makes a file and closes it when the test is over; see `create`.
Create = Callable[..., SharedFile]


@pytest.fixture
def nothing_open() -> Iterator[None]:
    """Check that what was opened is closed and every thread ended when the test is over."""
    before, threads = raw.descriptors(), raw.threads()
    yield
    if raw.descriptors() - before:
        gc.collect()  # of handles that a failed test dropped
    for thread in raw.threads() - threads:
        thread.join(10)

    assert raw.descriptors() - before == {}
    assert raw.threads() <= threads


@pytest.fixture
def keep(nothing_open: None) -> Iterator[Callable[[SharedFile], SharedFile]]:  # noqa: ARG001
    """Yield a function that has a handle closed when the test is over."""
    handles: list[SharedFile] = []

    def later(handle: SharedFile) -> SharedFile:
        handles.append(handle)
        return handle

    yield later
    for handle in reversed(handles):
        handle.close()
    handles.clear()


@pytest.fixture
def create(keep: Callable[[SharedFile], SharedFile], disk_path: Path) -> Create:
    """Return `SharedFile.create` for names in a fresh directory, where nothing is durable."""

    def make(name: str, size: int, **options: Any) -> SharedFile:
        options.setdefault("durability", "visible")
        return keep(SharedFile.create(disk_path / name, size, **options))

    return make


@pytest.fixture
def join(keep: Callable[[SharedFile], SharedFile], disk_path: Path) -> Create:
    """Return `SharedFile.open` for names in the same directory."""

    def make(name: str, rank: int | None = None, **options: Any) -> SharedFile:
        return keep(SharedFile.open(disk_path / name, rank, **options))

    return make


@pytest.fixture(params=["buffered", "direct"])
def mode(request: pytest.FixtureRequest) -> str:
    """Write through the page cache, and past it."""
    if request.param == "direct":
        request.getfixturevalue("real_disk")
    return str(request.param)
