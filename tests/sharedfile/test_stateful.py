"""A shared file against a model: whoever writes what and when, in the end it is the file."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvio
from kvio import Missing, SharedFile
from kvio.types import KiB, Verify

from . import raw

CELL = 16 * KiB
BLOCK = 4096
#: At least so many rules run by default.
STEPS = 2000


class Game:
    """What a state machine plays with; where it makes its files."""

    root: Path
    modes: tuple[str, ...]
    steps = 0


class SharedFileMachine(RuleBasedStateMachine):
    """Random writes from threads, rank handles and the creator; then a seal, and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=Game.root))
        self.before = raw.descriptors()
        self.number = 0
        self.file: SharedFile
        self.handles: dict[int, SharedFile] = {}
        self.sealed = True  # the file before the first one
        self.pool = ThreadPoolExecutor(4)

    # Layouts.

    @precondition(lambda self: self.sealed)
    @rule(
        data=st.data(),
        kind=st.sampled_from(["contiguous", "round-robin", "odd sizes"]),
        seed=st.integers(0, 1 << 32),
    )
    def create(self, data: st.DataObject, kind: str, seed: int) -> None:
        """Make a file of some blocks, whole or not."""
        size = data.draw(st.integers(0, 30 * BLOCK), "size")
        writers = data.draw(st.integers(1, 4), "writers")
        options: dict[str, Any] = {"mode": data.draw(st.sampled_from(Game.modes), "mode")}
        if kind == "round-robin":
            options["stripe_bytes"] = BLOCK * data.draw(st.integers(1, 6), "stripe")
        elif kind == "odd sizes":
            cuts = sorted(data.draw(st.integers(0, size), "cut") for _ in range(writers - 1))
            options["sizes"] = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        while self.handles:
            self.handles.popitem()[1].close()
        if self.number:
            self.file.close()
        self.payload = random.Random(seed).randbytes(size)
        self.number += 1
        self.path = self.root / f"file{self.number}"
        self.file = SharedFile.create(
            self.path, size, writers=writers, cell_bytes=CELL, durability="visible", **options
        )
        self.owner = bytearray(size)
        for rank in range(writers):
            for offset, nbytes in self.file.domain(rank):
                self.owner[offset : offset + nbytes] = bytes([rank]) * nbytes
        #: What was written, and by whom of those that are still there.
        self.written = bytearray(size)
        self.claimed: set[int] = set()
        self.sealed = False

    # What the model knows.

    def cells(self, rank: int | None = None) -> list[Missing]:
        """Divide the file into cells without kvio: each begins on a block of its stripe."""
        found = []
        for own in range(self.file.writers) if rank is None else [rank]:
            for offset, nbytes in self.file.domain(own):
                at, origin = offset, offset // BLOCK * BLOCK
                while at < offset + nbytes:
                    stop = min(origin + CELL, offset + nbytes)
                    found.append(Missing(own, at, stop - at))
                    at, origin = stop, origin + CELL
        return sorted(found, key=lambda cell: cell.offset)

    def is_whole(self, cell: Missing) -> bool:
        """Return whether all bytes of a cell were written."""
        return 0 not in self.written[cell.offset : cell.offset + cell.nbytes]

    def forget_parts(self, rank: int) -> None:
        """A new handle of a rank starts with whole cells alone."""
        for cell in self.cells(rank):
            if not self.is_whole(cell):
                self.written[cell.offset : cell.offset + cell.nbytes] = bytes(cell.nbytes)

    def handle_of(self, rank: int) -> SharedFile:
        """Return the handle that writes for a rank: its own, or the creator's."""
        if rank in self.handles:
            return self.handles[rank]
        if rank not in self.claimed:
            self.forget_parts(rank)
            self.claimed.add(rank)
        return self.file

    def draw_gap(self, data: st.DataObject) -> tuple[int, int] | None:
        """Draw a range of one rank's bytes that are not written yet."""
        free = [at for at in range(len(self.written)) if not self.written[at]]
        if not free:
            return None
        start = free[data.draw(st.integers(0, len(free) - 1), "start")]
        if data.draw(st.booleans(), "from the gap's start"):
            while (
                start and not self.written[start - 1] and self.owner[start - 1] == self.owner[start]
            ):
                start -= 1
        end, most = start, data.draw(st.sampled_from([1, 100, 4096, 20_000, 1 << 20]), "most")
        while (
            end < len(self.written)
            and end - start < most
            and not self.written[end]
            and self.owner[end] == self.owner[start]
        ):
            end += 1
        return start, end

    # Rules.

    @precondition(lambda self: not self.sealed)
    @rule(data=st.data(), how=st.sampled_from(["bytes", "list", "future"]))
    def write(self, data: st.DataObject, how: str) -> None:
        """Write a piece that was not written."""
        gap = self.draw_gap(data)
        if gap is None:
            return
        start, end = gap
        rank = self.owner[start]
        handle = self.handle_of(rank)
        gap_bytes = self.payload[start:end]
        if how == "list":
            third = (end - start) // 3
            parts = [gap_bytes[:third], b"", gap_bytes[third:]]
            assert handle.pwrite(parts, start) == end - start
        elif how == "future":
            assert handle.submit_pwrite(gap_bytes, start).result(60) == end - start
        else:
            assert handle.pwrite(bytearray(gap_bytes), start) == end - start
        self.written[start:end] = b"\1" * (end - start)

    @precondition(lambda self: not self.sealed)
    @rule(
        seed=st.integers(0, 1 << 32),
        nbytes=st.sampled_from([700, 4096, 9999]),
        limit=st.sampled_from([2, 5, 12, 1000]),
    )
    def write_at_once(self, seed: int, nbytes: int, limit: int) -> None:
        """Write some of what is left in pieces, in random order, from four threads."""
        pieces, at, size = [], 0, len(self.written)
        while at < size:
            end = at
            while (
                end < min(size, at + nbytes)
                and not self.written[end]
                and self.owner[end] == self.owner[at]
            ):
                end += 1
            if end > at:
                pieces.append((at, end))
            at = max(end, at + 1)
        random.Random(seed).shuffle(pieces)
        # A claim forgets parts of cells: that frees bytes, and takes none.
        chosen = [(a, b, self.handle_of(self.owner[a])) for a, b in pieces[:limit]]
        list(self.pool.map(lambda p: p[2].pwrite(self.payload[p[0] : p[1]], p[0]), chosen))
        for start, end, _ in chosen:
            self.written[start:end] = b"\1" * (end - start)

    @precondition(lambda self: not self.sealed)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        """Open a rank; refused where another handle writes for it."""
        rank = data.draw(st.integers(0, self.file.writers - 1), "rank")
        if rank in self.handles or rank in self.claimed:
            with pytest.raises(kvio.BlockExistsError):
                SharedFile.open(self.path, rank)
            return
        self.handles[rank] = SharedFile.open(self.path, rank)
        self.forget_parts(rank)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Close a rank's handle."""
        rank = data.draw(st.sampled_from(sorted(self.handles)), "rank")
        self.handles.pop(rank).close()

    @precondition(lambda self: not self.sealed and 1 in self.written)
    @rule(data=st.data())
    def overlap(self, data: st.DataObject) -> None:
        """A byte that was written is not written again, and the try changes nothing."""
        ones = [at for at, bit in enumerate(self.written) if bit]
        at = ones[data.draw(st.integers(0, len(ones) - 1), "byte")]
        rank = self.owner[at]
        handle = self.handle_of(rank)
        if self.written[at]:  # and not forgotten by the claim
            with pytest.raises(kvio.BlockSizeError, match="overlap"):
                handle.pwrite(b"\0", at)
        elif rank not in self.handles:  # the model claimed for the creator: so must it
            handle.pwrite(self.payload[at : at + 1], at)
            self.written[at] = 1

    @precondition(lambda self: not self.sealed and self.handles)
    @rule(data=st.data())
    def trespass(self, data: st.DataObject) -> None:
        """A rank's handle does not write another's bytes, nor any beyond the file."""
        rank = data.draw(st.sampled_from(sorted(self.handles)), "rank")
        others = [at for at, own in enumerate(self.owner) if own != rank]
        with pytest.raises(kvio.BlockSizeError):
            self.handles[rank].pwrite(b"\0", len(self.payload))
        if others:
            at = others[data.draw(st.integers(0, len(others) - 1), "byte")]
            with pytest.raises(kvio.BlockSizeError, match="domain"):
                self.handles[rank].pwrite(b"\0", at)

    @precondition(lambda self: not self.sealed)
    @rule()
    def seal(self) -> None:
        """Seal what is whole, and report who owes bytes where it is not."""
        owed = {cell.rank for cell in self.cells() if not self.is_whole(cell)}
        if owed:
            with pytest.raises(kvio.StorageTimeoutError) as caught:
                self.file.seal()
            for rank in range(self.file.writers):
                assert (f"rank {rank}" in str(caught.value)) == (rank in owed)
            assert not self.path.exists()
            return
        receipt = self.file.seal()
        self.sealed = True

        assert (receipt.nbytes, receipt.checksum) == (len(self.payload), raw.crc32c(self.payload))
        assert raw.names(self.root) == sorted(f"file{n + 1}" for n in range(self.number))
        assert raw.sealed(self.path).payload == self.payload

    @precondition(lambda self: self.sealed and self.number)
    @rule(data=st.data(), verify=st.sampled_from(["full", "length", "off"]))
    def read(self, data: st.DataObject, verify: Verify) -> None:
        """Any range is what was written, through the sealing handle and a new one."""
        size = len(self.payload)
        start, end = sorted(data.draw(st.integers(0, size), "edge") for _ in range(2))
        with SharedFile.open(self.path, verify=verify) as other:
            for handle in (self.file, other):
                out = bytearray(end - start)
                handle.pread_into(out, start)
                assert out == self.payload[start:end]

    # What always holds.

    @invariant()
    def missing_is_what_the_model_misses(self) -> None:
        """Every handle lists the cells that are not whole."""
        Game.steps += 1
        if self.sealed:
            return
        expected = [cell for cell in self.cells() if not self.is_whole(cell)]
        for handle in (self.file, *self.handles.values()):
            assert handle.missing() == expected

    def teardown(self) -> None:
        """Write what is missing and seal, with ranks' handles open; no descriptor stays open."""
        while not self.sealed:
            self.write_at_once(0, 9999, 1000)
            if 0 not in self.written:
                self.seal()
        self.pool.shutdown()
        for handle in self.handles.values():
            handle.close()
        if self.number:
            self.file.close()
        assert raw.descriptors() - self.before == {}
        shutil.rmtree(self.root)


@pytest.mark.slow
def test_a_shared_file_is_like_its_model(disk_path: Path, request: pytest.FixtureRequest) -> None:
    """Over 2,000 random steps no byte is lost, and no file is sealed that is not whole."""
    in_memory = request.getfixturevalue("disk_filesystem") in ("tmpfs", "ramfs")
    Game.root, Game.steps = disk_path, 0
    Game.modes = ("buffered",) if in_memory else ("buffered", "direct")
    examples = max(settings.default.max_examples, 60) if settings.default else 60
    run_state_machine_as_test(
        SharedFileMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

    assert os.listdir(disk_path) == []
    assert Game.steps >= STEPS
