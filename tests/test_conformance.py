"""Every backend of kvio, every variant of the POSIX ones, and the fakes keep the contract."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvio
from kvio.abc import Backend
from kvio.testing.fakes import (
    BatchlessBackend,
    FaultyBackend,
    ForwardingBackend,
    LatencyBackend,
    WrappedStore,
)
from kvio.testing.suite import BackendTests

from .media import IN_MEMORY, MemoryHooks, PosixHooks, Variant, remove_files
from .posix import mounts

VARIANTS = [
    Variant(*choices)
    for choices in itertools.product(
        ("posix-tmpfile", "posix-direct", "hybrid"),
        ("tmpfile", "rename"),
        ("block", "plain"),
        ("visible", "durable"),
    )
]
FAKES: tuple[Callable[[Backend], ForwardingBackend], ...] = (
    BatchlessBackend,
    FaultyBackend,
    LatencyBackend,
)


class TestMemory(MemoryHooks, BackendTests):
    """Blocks in memory keep the contract."""


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
class TestPosix(PosixHooks, BackendTests):
    """All 24 POSIX variants keep the contract."""

    @pytest.fixture(autouse=True)
    def _choose(self, variant: Variant, disk_filesystem: str) -> None:
        self.variant = variant
        self.rounds = 8 if variant.durability == "durable" else 25  # type: ignore[misc]
        if variant.needs_disk and disk_filesystem in IN_MEMORY:
            pytest.skip(f"{disk_filesystem} has no durable writes and no direct I/O")

    @pytest.fixture
    def tmp_path(self, variant: Variant, directories: dict[Variant, Path]) -> Iterator[Path]:
        """Use one directory a variant, emptied after each test: making 272 of them takes time."""
        if variant not in directories:
            pytest.skip("needs root, to mount a file system with a journal")
        yield directories[variant]
        if variant.layout == "block":
            remove_files(directories[variant])
        else:
            shutil.rmtree(directories[variant] / "root")


@pytest.fixture(scope="module")
def directories(disk_parent: Path) -> Iterator[dict[Variant, Path]]:
    """Yield a directory for each variant, on a disk where there is one."""
    with ExitStack() as stack:
        given = tempfile.TemporaryDirectory(prefix="kvio-test-", dir=disk_parent)
        parent = Path(stack.enter_context(given))
        journaled = None
        if os.geteuid() == 0 or mounts.has_journal(parent):
            journaled = stack.enter_context(mounts.journaled(parent))
        paths = {}
        for variant in VARIANTS:
            place = journaled if variant.needs_journal else parent
            if place is not None:
                paths[variant] = place / str(variant)
                paths[variant].mkdir()
        yield paths


@pytest.mark.parametrize("wrap", FAKES)
class TestFakesOverMemory(MemoryHooks, BackendTests):
    """A fake without instructions keeps the contract of memory."""

    @pytest.fixture(autouse=True)
    def _choose(self, wrap: Callable[[Backend], ForwardingBackend]) -> None:
        self.wrap = wrap

    def open(self, tmp_path: Path) -> WrappedStore[ForwardingBackend]:
        """Open a fake over memory."""
        return WrappedStore(str(super().open(tmp_path)), self.wrap)

    def raw_get(self, store: kvio.Store, key: str) -> bytes | None:
        """Look into the dictionary below the fake."""
        assert isinstance(store, WrappedStore)
        block = store.wrapper.inner._blocks.get(key)
        return None if block is None else bytes(block.data)


@pytest.mark.parametrize("wrap", FAKES)
class TestFakesOverFiles(PosixHooks, BackendTests):
    """A fake without instructions keeps the contract of files."""

    variant = Variant("hybrid", "tmpfile", "block", "visible")

    @pytest.fixture(autouse=True)
    def _choose(self, wrap: Callable[[Backend], ForwardingBackend]) -> None:
        self.wrap = wrap

    @pytest.fixture
    def tmp_path(self, disk_path: Path) -> Path:
        """Use a disk, where there is one."""
        return disk_path

    def open(self, tmp_path: Path) -> WrappedStore[ForwardingBackend]:
        """Open a fake over files."""
        return WrappedStore(str(super().open(tmp_path)), self.wrap)
