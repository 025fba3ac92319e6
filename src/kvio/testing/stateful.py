"""A store against a dictionary: Hypothesis plays long random games and shrinks what it finds.

    class MyMachine(BackendMachine):
        def open(self, tmp_path):
            return f"mine://{tmp_path}"

    TestMyMachine = MyMachine.TestCase

The raw hooks of `BackendHooks`, where given, let the game damage blocks too.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import kvio
from kvio.testing.hooks import BackendHooks, Damage
from kvio.testing.payloads import Guarded, cut, payload
from kvio.types import BlockStatus, IfExists

_KEYS: Final = ("a", "b", "dir/a", "dir/b", "dir/sub/c", "K=1@x+y.z", "k" * 200)
_SIZES: Final = (0, 1, 63, 64, 511, 4095, 4096, 4097, 8192, 70_001)

keys = st.sampled_from(_KEYS)
sizes = st.sampled_from(_SIZES)
seeds = st.integers(0, 50)
taken = st.sampled_from(("keep", "replace", "error"))
#: What `keep` recognises as broken without reading the payload.
damages = st.sampled_from(sorted(frozenset(Damage) - {Damage.PAYLOAD_BIT}))


class BackendMachine(BackendHooks, RuleBasedStateMachine):
    """Random calls on one store, each checked against a dictionary of what must be stored.

    Attributes:
        directory: parent of the directory each game gets; None is the system's temporary one.
    """

    directory: ClassVar[Path | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, bytes] = {}
        self.broken: set[str] = set()

    @initialize()
    def start(self) -> None:
        """Open an empty store."""
        self.tmp_path = Path(tempfile.mkdtemp(prefix="kvio-game-", dir=self.directory))
        self.store = self.open_now(self.tmp_path)

    def teardown(self) -> None:
        """Close the store and remove its directory."""
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.tmp_path)

    # What a write must do

    def _expect(self, key: str, data: bytes, if_exists: IfExists) -> BlockStatus:
        standing = self.model.get(key)
        if standing is not None and if_exists == "error":
            return BlockStatus.EXISTS
        intact = standing is not None and key not in self.broken
        if intact and if_exists == "keep" and len(standing or b"") == len(data):
            return BlockStatus.KEPT
        self.model[key] = data
        self.broken.discard(key)
        return BlockStatus.OK

    @rule(key=keys, nbytes=sizes, seed=seeds, if_exists=taken, cuts=st.lists(sizes, max_size=3))
    def write(self, key: str, nbytes: int, seed: int, if_exists: IfExists, cuts: list[int]) -> None:
        """Write one block, gathered from pieces."""
        data = payload(nbytes, seed)
        expected = self._expect(key, data, if_exists)
        if expected is BlockStatus.EXISTS:
            with pytest.raises(kvio.BlockExistsError):
                self.store.write_block(key, cut(data, cuts), if_exists=if_exists)
            return

        receipt = self.store.write_block(key, cut(data, cuts), if_exists=if_exists)

        assert receipt.existed == (expected is BlockStatus.KEPT)
        assert (receipt.key, receipt.nbytes) == (key, nbytes)

    @rule(
        items=st.lists(st.tuples(keys, sizes, seeds), max_size=8, unique_by=lambda item: item[0]),
        if_exists=taken,
    )
    def write_batch(self, items: list[tuple[str, int, int]], if_exists: IfExists) -> None:
        """Write a batch of different keys."""
        blocks = [(key, payload(nbytes, seed)) for key, nbytes, seed in items]
        expected = [self._expect(key, data, if_exists) for key, data in blocks]

        results = self.store.write_blocks(blocks, if_exists=if_exists)

        assert [(r.key, r.status) for r in results] == [
            (key, status) for (key, _), status in zip(blocks, expected, strict=True)
        ]

    # What a read must give

    @rule(key=keys)
    def read(self, key: str) -> None:
        """Read one block into fresh memory."""
        if key not in self.model:
            with pytest.raises(kvio.BlockNotFoundError):
                self.store.read_block(key)
        elif key in self.broken:
            with pytest.raises(kvio.CorruptBlockError):
                self.store.read_block(key)
        else:
            assert self.store.read_block(key) == self.model[key]

    @rule(key=keys, room=sizes, misalign=st.integers(0, 2))
    def read_into(self, key: str, room: int, misalign: int) -> None:
        """Read one block into memory that may be too small or too large."""
        out = Guarded(room, misalign=misalign)
        data = self.model.get(key)
        if data is None:
            with pytest.raises(kvio.BlockNotFoundError):
                self.store.read_block_into(key, out.view)
        elif key in self.broken:
            with pytest.raises((kvio.CorruptBlockError, kvio.BlockSizeError)):
                self.store.read_block_into(key, out.view)
        elif len(data) > room:
            with pytest.raises(kvio.BlockSizeError):
                self.store.read_block_into(key, out.view)
        else:
            assert self.store.read_block_into(key, out.view) == len(data)
            assert out.view[: len(data)] == data
        assert out.intact()

    @rule(key=keys, offset=st.integers(0, 80_000), nbytes=st.integers(0, 80_000))
    def read_range(self, key: str, offset: int, nbytes: int) -> None:
        """Read a range, which may begin or end beyond the block."""
        data = self.model.get(key)
        if data is None or key in self.broken:
            with pytest.raises((kvio.BlockNotFoundError, kvio.CorruptBlockError)):
                self.store.read_block(key, offset=offset, nbytes=nbytes)
        elif offset > len(data):
            with pytest.raises(kvio.BlockSizeError):
                self.store.read_block(key, offset=offset, nbytes=nbytes)
        else:
            view = self.store.read_block(key, offset=offset, nbytes=nbytes)
            assert view == data[offset : offset + nbytes]

    @rule(wanted=st.lists(st.tuples(keys, sizes), max_size=8))
    def read_batch(self, wanted: list[tuple[str, int]]) -> None:
        """Read a batch, in which a key may come several times."""
        outs = [Guarded(room) for _, room in wanted]

        results = self.store.read_blocks_into(
            [(key, out.view) for (key, _), out in zip(wanted, outs, strict=True)]
        )

        for result, (key, room), out in zip(results, wanted, outs, strict=True):
            assert result.key == key
            self._check_result(result, room, out)

    def _check_result(self, result: kvio.BlockResult, room: int, out: Guarded) -> None:
        data = self.model.get(result.key)
        if data is None:
            assert result.status is BlockStatus.MISSING
        elif result.key in self.broken:
            assert result.status in (BlockStatus.CORRUPT, BlockStatus.FAILED)
        elif len(data) > room:
            assert isinstance(result.error, kvio.BlockSizeError)
        else:
            assert result.status is (BlockStatus.OK if len(data) == room else BlockStatus.SHORT)
            assert out.view[: result.nbytes] == data
        assert out.intact()

    @rule(wanted=st.lists(keys, max_size=6))
    def look(self, wanted: list[str]) -> None:
        """Look blocks up without reading them."""
        there = [key in self.model and key not in self.broken for key in wanted]
        assert [self.store.contains(key) for key in wanted] == there
        named = [key in self.model or key in self.broken for key in wanted]
        leading = self.store.count_leading(wanted)  # a damaged block may count
        assert [*there, False].index(False) <= leading <= [*named, False].index(False)
        for key, present in zip(wanted, there, strict=True):
            assert self.store.verify_block(key).ok == present
            if present:
                assert self.store.stat_block(key).nbytes == len(self.model[key])

    # What changes under way

    @rule(key=keys)
    def delete(self, key: str) -> None:
        """Delete one block."""
        assert self.store.delete_block(key) == (key in self.model)
        self.model.pop(key, None)
        self.broken.discard(key)

    @rule(gone=st.lists(keys, max_size=4, unique=True))
    def delete_batch(self, gone: list[str]) -> None:
        """Delete a batch of different keys."""
        results = self.store.delete_blocks(gone)

        assert [result.ok for result in results] == [key in self.model for key in gone]
        for key in gone:
            self.model.pop(key, None)
            self.broken.discard(key)

    @precondition(lambda self: self.store.capabilities.shared)
    @rule()
    def reopen(self) -> None:
        """Close the store and open its storage again."""
        self.store.close()
        self.store = self.open_now(self.tmp_path)

    @precondition(lambda self: self.model and self.has_hook("raw_put") and self._detects())
    @rule(how=damages, choice=st.randoms(use_true_random=False))
    def damage_one(self, how: Damage, choice: st.DataObject) -> None:
        """Damage one block behind the store's back."""
        key = choice.choice(sorted(self.model))  # type: ignore[attr-defined]  # a Random
        if key in self.broken:
            return
        self.damage(self.store, key, how)
        self.broken.add(key)

    def _detects(self) -> bool:
        return self.detects(self.store) == frozenset(Damage)

    @invariant()
    def lists_what_is_there(self) -> None:
        """The keys listed are those of the model."""
        if hasattr(self, "store"):
            assert sorted(self.store.list_keys()) == sorted(self.model)
            expected = sorted(key for key in self.model if key.startswith("dir/"))
            assert sorted(self.store.list_keys("dir/")) == expected
