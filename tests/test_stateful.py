"""Random games on every kind of store, each against a dictionary."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

import kvio
from kvio.testing.fakes import BatchlessBackend, WrappedStore
from kvio.testing.stateful import BackendMachine

from .media import IN_MEMORY, MemoryHooks, PosixHooks, Variant, filesystem_of

#: A third of the games that other properties get: each is a hundred calls.
_GAME = settings(max_examples=settings().max_examples // 3, stateful_step_count=25)


class MemoryMachine(MemoryHooks, BackendMachine):
    """Games on a memory store."""


class TmpfileMachine(PosixHooks, BackendMachine):
    """Games on buffered files."""

    variant = Variant("posix-tmpfile", "tmpfile", "block", "visible")


class RenameMachine(PosixHooks, BackendMachine):
    """Games on files that are published by rename."""

    variant = Variant("hybrid", "rename", "block", "visible")


class PlainMachine(PosixHooks, BackendMachine):
    """Games on plain files."""

    variant = Variant("hybrid", "tmpfile", "plain", "visible")


class DirectMachine(PosixHooks, BackendMachine):
    """Games on direct I/O."""

    variant = Variant("posix-direct", "tmpfile", "block", "visible")
    directory = Path(os.environ.get("KVIO_TEST_DIR") or tempfile.gettempdir())

    def open(self, tmp_path: Path) -> kvio.Store | str:
        """Open the store where a disk is."""
        if filesystem_of(tmp_path) in IN_MEMORY:
            pytest.skip(f"no direct I/O: {tmp_path} is in memory; set KVIO_TEST_DIR")
        return super().open(tmp_path)


class BatchlessMachine(PosixHooks, BackendMachine):
    """Games on files whose batches the store fans out."""

    variant = Variant("hybrid", "tmpfile", "block", "visible")

    def open(self, tmp_path: Path) -> kvio.Store:
        """Open the store with its native batches hidden."""
        return WrappedStore(str(super().open(tmp_path)), BatchlessBackend)


TestMemory = MemoryMachine.TestCase
TestTmpfile = TmpfileMachine.TestCase
TestRename = RenameMachine.TestCase
TestPlain = PlainMachine.TestCase
TestDirect = DirectMachine.TestCase
TestBatchless = BatchlessMachine.TestCase
TestMemory.settings = TestTmpfile.settings = TestRename.settings = _GAME
TestPlain.settings = TestDirect.settings = TestBatchless.settings = _GAME
