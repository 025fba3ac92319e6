"""Damage behind a store's back is noticed, named, never returned, and healed by a write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import pytest

import kvio
from kvio.core import streams
from kvio.testing.hooks import Damage, StoreTests
from kvio.testing.payloads import Guarded, payload
from kvio.types import BlockStatus as Status
from kvio.types import IfExists

_SIZES = (1, 4096, 70_000)
_GENEROUS_S = 60.0


class Broken(NamedTuple):
    """A damaged block, and how it was damaged."""

    key: str
    nbytes: int
    how: Damage

    @property
    def mode(self) -> IfExists:
        """The ``if_exists`` that repairs it: ``keep`` if trailer or length show the damage."""
        return "replace" if self.how is Damage.PAYLOAD_BIT else "keep"


class DamageTests(StoreTests):
    """The behaviour of a store with a corrupt block."""

    @pytest.fixture
    def damaged(self, store: kvio.Store) -> list[Broken]:
        """Put intact blocks ``good/N`` in the store, and damaged ones, which are returned."""
        self.require("raw_stored", "raw_put")
        kinds = sorted(self.detects(store))
        if not kinds:
            pytest.skip("the store does not promise to notice damage (capability checksum)")
        blocks = [
            Broken(f"bad/{how.name}/{nbytes}", nbytes, how)
            for how, nbytes in itertools.product(kinds, _SIZES)
        ]
        store.write_blocks([(block.key, payload(block.nbytes, 1)) for block in blocks])
        store.write_blocks([(f"good/{nbytes}", payload(nbytes, 2)) for nbytes in _SIZES])
        for block in blocks:
            self.damage(store, block.key, block.how)
        return blocks

    def test_a_damaged_block_is_never_returned(
        self, store: kvio.Store, damaged: list[Broken]
    ) -> None:
        """Reads of it, into fresh and given memory, raise CorruptBlockError naming the block."""
        for block in damaged:
            out = Guarded(block.nbytes, misalign=1)
            spacious = bytearray(block.nbytes + 5000)
            with pytest.raises(kvio.CorruptBlockError) as fresh:
                store.read_block(block.key)
            with pytest.raises(kvio.CorruptBlockError) as given:
                store.read_block_into(block.key, out.view)
            with pytest.raises(kvio.CorruptBlockError) as roomy:
                store.read_block_into(block.key, [spacious])

            assert {caught.value.key for caught in (fresh, given, roomy)} == {block.key}
            assert out.intact(), block
        assert all(self.holds(store, f"good/{n}", payload(n, 2)) for n in _SIZES)

    def test_a_reader_ends_before_its_last_bytes(
        self, store: kvio.Store, damaged: list[Broken], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file object of a damaged block fails before all is read, in many pieces or in one."""
        for block, piece_bytes in itertools.product(damaged, (kvio.KiB, kvio.GiB)):
            monkeypatch.setattr(streams, "_PIECE_BYTES", piece_bytes)
            got: list[bytes] = []
            with pytest.raises(kvio.CorruptBlockError), store.open_reader(block.key) as reader:
                got.extend(iter(partial(reader.read, 100), b""))
            assert sum(map(len, got)) < block.nbytes, block
        with store.open_reader(f"good/{_SIZES[0]}") as reader:
            assert reader.read() == payload(_SIZES[0], 2)

    def test_a_batch_says_which_are_damaged(self, store: kvio.Store, damaged: list[Broken]) -> None:
        """In a batch the damaged blocks are ``corrupt`` and their neighbours are read."""
        for block in damaged:
            outs = [bytearray(block.nbytes) for _ in range(3)]
            good = f"good/{block.nbytes}"

            results = store.read_blocks_into(zip([good, block.key, good], outs, strict=True))

            assert [r.status for r in results] == ["ok", "corrupt", "ok"], block
            assert isinstance(results[1].error, kvio.CorruptBlockError)
            assert outs[0] == outs[2] == payload(block.nbytes, 2)

    def test_verify_finds_it(self, store: kvio.Store, damaged: list[Broken]) -> None:
        """`verify_block` says ``corrupt`` of it and ``ok`` of the others."""
        found = {block: store.verify_block(block.key).status for block in damaged}

        assert set(found.values()) == {kvio.BlockStatus.CORRUPT}, found
        assert all(store.verify_block(f"good/{nbytes}").ok for nbytes in _SIZES)

    def test_a_write_heals_it(self, store: kvio.Store, damaged: list[Broken]) -> None:
        """``keep`` replaces a block whose end or length is broken, ``replace`` any."""
        for block in damaged:
            receipt = store.write_block(block.key, payload(block.nbytes, 3), if_exists=block.mode)

            assert not receipt.existed, block
            assert self.holds(store, block.key, payload(block.nbytes, 3)), block

    def test_a_batch_of_writes_heals_it(self, store: kvio.Store, damaged: list[Broken]) -> None:
        """A batch with ``keep`` replaces corrupt blocks and keeps the others."""
        modes: tuple[IfExists, ...] = ("keep", "replace")
        for mode in modes:
            broken = [block for block in damaged if block.mode == mode]
            results = store.write_blocks(
                [(block.key, payload(block.nbytes, 3)) for block in broken], if_exists=mode
            )
            assert all(r.status is kvio.BlockStatus.OK for r in results)
        kept = store.write_blocks([(f"good/{n}", payload(n, 2)) for n in _SIZES])

        assert all(r.status is kvio.BlockStatus.KEPT for r in kept)
        for block in damaged:
            assert self.holds(store, block.key, payload(block.nbytes, 3)), block

    def test_what_was_found_is_healed_by_keep(self, store: kvio.Store) -> None:
        """``keep`` replaces what this store has found corrupt, however it found it and writes."""
        for how, nbytes, find, write in self._ways(store):
            key = f"found/{how.name}/{nbytes}"
            store.write_block(key, payload(nbytes, 1), if_exists="replace")
            self.damage(store, key, how)

            assert find(store, key, nbytes), (find.__name__, key)
            assert not write(store, key, payload(nbytes, 3)), (write.__name__, key)
            assert self.holds(store, key, payload(nbytes, 3)), (write.__name__, key)
            assert write(store, key, payload(nbytes, 3)), "and what is intact is kept again"

    def test_what_another_healed_is_kept(self, store: kvio.Store) -> None:
        """A block that was found corrupt and is intact by now is not written again."""
        for how, nbytes, find, write in self._ways(store):
            key = f"found/{how.name}/{nbytes}"
            store.write_block(key, payload(nbytes, 1), if_exists="replace")
            intact = self.raw_stored(store, key)
            self.damage(store, key, how)

            assert find(store, key, nbytes), (find.__name__, key)
            self.raw_put(store, key, intact)
            assert write(store, key, payload(nbytes, 3)), (write.__name__, key)
            assert self.holds(store, key, payload(nbytes, 1)), (write.__name__, key)

    def _ways(self, store: kvio.Store) -> Iterator[tuple[Damage, int, _Finder, _Writer]]:
        """Yield every kind of damage with every way to find it, and ways to write over it."""
        self.require("raw_stored", "raw_put")
        kinds = sorted(self.detects(store))
        if not kinds:
            pytest.skip("the store does not promise to notice damage (capability checksum)")
        for turn, how in enumerate(kinds):
            for at, find in enumerate(_FINDERS, turn):
                yield how, _SIZES[at % len(_SIZES)], find, _WRITERS[at % len(_WRITERS)]

    def test_a_batch_keeps_what_is_intact_beside_what_it_heals(
        self, store: kvio.Store, damaged: list[Broken]
    ) -> None:
        """Of one ``keep`` batch each result is that of its own block, in order."""
        for block in damaged:
            assert _find_by_verifying(store, block.key, block.nbytes)
        items = [
            (name, payload(block.nbytes, 2))
            for block in damaged
            for name in (block.key, f"good/{block.nbytes}", block.key, f"new/{block.key}")
        ]

        results = store.write_blocks(items)

        assert [(r.key, r.nbytes) for r in results] == [(key, len(data)) for key, data in items]
        assert all(self.holds(store, key, data) for key, data in items)
        for at in range(0, len(results), 4):
            broken, good, twin, new = (result.status for result in results[at : at + 4])
            assert (good, new) == (Status.KEPT, Status.OK)
            assert Status.OK in (broken, twin)

    def test_what_is_corrupt_can_be_moved_out(
        self, store: kvio.Store, damaged: list[Broken], tmp_path: Path
    ) -> None:
        """A damaged block is removed with its bytes kept as they were, or stays with a reason."""
        if not store.capabilities.raw_blocks:
            pytest.skip("the backend does not promise raw_blocks")
        directory = tmp_path / "quarantine"
        for block in damaged:
            stored = self.raw_stored(store, block.key)

            removal = store.remove_corrupt(block.key, quarantine=directory)

            if removal.error is not None:
                assert block.how is not Damage.PAYLOAD_BIT, removal
                assert self.raw_stored(store, block.key) == stored
                continue
            assert removal.status is Status.CORRUPT
            assert Path(str(removal.path)).read_bytes() == stored, block
            assert store.verify_block(block.key).status is Status.MISSING
            assert store.remove_corrupt(block.key).status is Status.MISSING
        for nbytes in _SIZES:
            removal = store.remove_corrupt(f"good/{nbytes}", quarantine=directory)
            assert (removal.status, removal.path) == (Status.OK, None)
            assert self.holds(store, f"good/{nbytes}", payload(nbytes, 2))

    def test_an_intact_block_of_another_key_is_not_removed(self, store: kvio.Store) -> None:
        """What is corrupt only for a wrong key or namespace is good data, and stays."""
        self.require("raw_stored", "raw_put")
        if not (self.detects(store) and store.capabilities.raw_blocks):
            pytest.skip("the store does not promise to notice damage and to hand out blocks")
        store.write_block("one", payload(5000, 1))
        store.write_block("two", payload(5000, 2))
        stored = self.raw_stored(store, "one")
        self.raw_put(store, "two", stored)

        removal = store.remove_corrupt("two")

        assert isinstance(removal.error, kvio.UnsupportedError)
        assert self.raw_stored(store, "two") == stored

    def test_it_can_be_listed_and_deleted(self, store: kvio.Store, damaged: list[Broken]) -> None:
        """A damaged block is listed under its key and can be removed by it."""
        keys = {block.key for block in damaged}

        assert set(store.list_keys("bad/")) == keys
        assert all(store.delete_block(key) for key in keys)
        assert list(store.list_keys("bad/")) == []

    def test_it_is_not_contained(self, store: kvio.Store, damaged: list[Broken]) -> None:
        """`contains` denies what its end shows, and `stat_block` raises."""
        for block in _at_the_end(damaged):
            assert not store.contains(block.key), block
            with pytest.raises(kvio.CorruptBlockError):
                store.stat_block(block.key)

    def test_error_does_not_take_its_place(self, store: kvio.Store, damaged: list[Broken]) -> None:
        """``error`` means a free key: a damaged block still takes it."""
        for block in damaged:
            with pytest.raises(kvio.BlockExistsError):
                store.write_block(block.key, payload(block.nbytes, 3), if_exists="error")

    def test_a_range_of_it_is_refused(self, store: kvio.Store, damaged: list[Broken]) -> None:
        """A range read checks the end of the stored bytes, where the damage shows."""
        for block in _at_the_end(damaged):
            with pytest.raises(kvio.CorruptBlockError):
                store.read_block(block.key, offset=0, nbytes=1)
            with pytest.raises(kvio.CorruptBlockError):
                store.read_block_into(block.key, bytearray(1), offset=1)

    def test_a_misplaced_block_is_noticed(self, store: kvio.Store) -> None:
        """Stored bytes of one key found under another are corrupt, however intact."""
        self.require("raw_stored", "raw_put")
        if not self.detects(store):
            pytest.skip("the store does not promise to notice damage (capability checksum)")
        for nbytes in _SIZES:
            store.write_block(f"one/{nbytes}", payload(nbytes, 1))
            store.write_block(f"two/{nbytes}", payload(nbytes, 2))
            self.raw_put(store, f"two/{nbytes}", self.raw_stored(store, f"one/{nbytes}"))

            with pytest.raises(kvio.CorruptBlockError):
                store.read_block(f"two/{nbytes}")
            assert not store.contains(f"two/{nbytes}")
            assert self.holds(store, f"one/{nbytes}", payload(nbytes, 1))

    def test_a_flipped_bit_in_any_byte_is_noticed(self, store: kvio.Store) -> None:
        """No byte of payload or trailer can change unnoticed; padding may."""
        self.require("raw_stored", "raw_put")
        if Damage.PAYLOAD_BIT not in self.detects(store):
            pytest.skip("the store does not promise to notice a flipped bit (checksum)")
        store.write_block("block", payload(20, 1))
        stored = self.raw_stored(store, "block")
        for at in (*range(20), *range(max(20, len(stored) - 64), len(stored))):
            flipped = bytearray(stored)
            flipped[at] ^= 1 << at % 8
            self.raw_put(store, "block", bytes(flipped))

            with pytest.raises(kvio.CorruptBlockError):
                store.read_block_into("block", bytearray(20))


def _find_by_reading(store: kvio.Store, key: str, _nbytes: int) -> bool:
    return _raises_corrupt(lambda: store.read_block(key))


def _find_by_reading_into(store: kvio.Store, key: str, nbytes: int) -> bool:
    return _raises_corrupt(lambda: store.read_block_into(key, bytearray(nbytes)))


def _find_in_time(store: kvio.Store, key: str, nbytes: int) -> bool:
    out = bytearray(nbytes)
    return _raises_corrupt(lambda: store.read_block_into(key, out, timeout=_GENEROUS_S))


def _find_by_a_batch(store: kvio.Store, key: str, nbytes: int) -> bool:
    [result] = store.read_blocks_into([(key, bytearray(nbytes))])
    return result.status is Status.CORRUPT


def _find_by_submitting(store: kvio.Store, key: str, nbytes: int) -> bool:
    future = store.submit_read_into(key, bytearray(nbytes))
    return isinstance(future.exception(_GENEROUS_S), kvio.CorruptBlockError)


def _find_by_verifying(store: kvio.Store, key: str, _nbytes: int) -> bool:
    return store.verify_block(key).status is Status.CORRUPT


def _raises_corrupt(call: Callable[[], object]) -> bool:
    try:
        call()
    except kvio.CorruptBlockError:
        return True
    return False


def _write_one(store: kvio.Store, key: str, data: bytes) -> bool:
    return store.write_block(key, data).existed


def _write_in_time(store: kvio.Store, key: str, data: bytes) -> bool:
    return store.write_block(key, data, timeout=_GENEROUS_S).existed


def _write_a_batch(store: kvio.Store, key: str, data: bytes) -> bool:
    [result] = store.write_blocks([(key, data)])
    return result.status is Status.KEPT


def _submit(store: kvio.Store, key: str, data: bytes) -> bool:
    return store.submit_write(key, data).result(_GENEROUS_S).existed


#: Finds that a block is corrupt, and says whether it did.
_Finder: TypeAlias = Callable[[kvio.Store, str, int], bool]
#: Writes with ``keep``, and says whether the block was kept.
_Writer: TypeAlias = Callable[[kvio.Store, str, bytes], bool]

_FINDERS: Final[tuple[_Finder, ...]] = (
    *(_find_by_reading, _find_by_reading_into, _find_in_time),
    *(_find_by_a_batch, _find_by_submitting, _find_by_verifying),
)
_WRITERS: Final[tuple[_Writer, ...]] = (_write_one, _write_in_time, _write_a_batch, _submit)


def _at_the_end(blocks: list[Broken]) -> Iterator[Broken]:
    """Return the blocks whose damage shows without reading the payload."""
    return (block for block in blocks if block.how is not Damage.PAYLOAD_BIT)
