"""Batches: one result per block, in order, and no block stops another."""

from __future__ import annotations

from typing import Any

import pytest

import kvio
from kvio.testing.hooks import StoreTests, level_of
from kvio.testing.payloads import Guarded, crc32c, cut, payload
from kvio.types import BlockStatus as Status
from kvio.types import IfExists


class BatchTests(StoreTests):
    """The promises of `write_blocks`, `read_blocks_into` and `delete_blocks`."""

    def test_batches_round_trip_in_order(self, store: kvio.Store) -> None:
        """Many blocks of mixed sizes are written and read back, results in input order."""
        items = [(f"batch/{i}", payload(i * 37 % 9000, i)) for i in range(150)]

        written = store.write_blocks(items)
        outs = [Guarded(len(data), misalign=i % 3) for i, (_, data) in enumerate(items)]
        read = store.read_blocks_into(
            [(key, out.view) for (key, _), out in zip(items, outs, strict=True)]
        )

        for results in (written, read):
            assert [(r.key, r.nbytes) for r in results] == [(k, len(d)) for k, d in items]
            assert {r.status for r in results} == {Status.OK}
        assert [bytes(out.view) for out in outs] == [data for _, data in items]
        assert all(out.intact() for out in outs)

    def test_batches_of_large_and_small_blocks(self, store: kvio.Store) -> None:
        """Blocks of every size go in one batch, scattered and gathered."""
        items = [(f"mixed/{n}", payload(n, n)) for n in self.sizes]
        outs = [bytearray(len(data)) for _, data in items]

        written = store.write_blocks([(k, cut(d, [len(d) // 3, 1])) for k, d in items])
        read = store.read_blocks_into(
            [(k, cut_writable(out)) for (k, _), out in zip(items, outs, strict=True)]
        )

        assert all(result.ok for result in (*written, *read))
        assert outs == [data for _, data in items]

    def test_receipts_of_a_batch_are_those_of_single_writes(self, store: kvio.Store) -> None:
        """Each result of a written batch carries the receipt a single call would have given."""
        items = [(f"batch/{i}", payload(100 + i, i)) for i in range(20)]

        results = store.write_blocks(iter(items))

        for result, (key, data) in zip(results, items, strict=True):
            assert result.receipt is not None
            assert (result.receipt.key, result.receipt.nbytes) == (key, len(data))
            assert result.receipt.level is level_of(store)
            assert not result.receipt.existed
            if store.capabilities.checksum:
                assert result.receipt.checksum == crc32c(data)

    def test_an_empty_batch_has_no_results(self, store: kvio.Store) -> None:
        """No items, no results, no error."""
        assert store.write_blocks([]) == []
        assert store.read_blocks_into(iter(())) == []
        assert store.delete_blocks([]) == []

    def test_reads_with_mixed_outcomes(self, store: kvio.Store) -> None:
        """Found, missing, short or too small: each block has its own outcome."""
        items = [(f"block/{i}", payload(1000, i)) for i in range(8)]
        store.write_blocks(items)
        rooms = (1000, 1500, 999, 1000, 0, 70_000, 1000, 1001)
        wanted = [*(f"block/{i}" for i in range(8)), "missing", "no/such"]
        outs = [Guarded(room) for room in (*rooms, 1000, 0)]

        results = store.read_blocks_into(
            [(key, out.view) for key, out in zip(wanted, outs, strict=True)]
        )

        ok, short, failed, missing = Status.OK, Status.SHORT, Status.FAILED, Status.MISSING
        assert [result.key for result in results] == wanted
        assert [result.status for result in results] == [
            *(ok, short, failed, ok, failed, short, ok, short, missing, missing)
        ]
        for result, out, (_, data) in zip(results[:8], outs, items, strict=False):
            if result.status is failed:
                assert isinstance(result.error, kvio.BlockSizeError)
            else:
                assert (result.nbytes, result.error) == (1000, None)
                assert out.view[:1000] == data
        assert all(isinstance(r.error, kvio.BlockNotFoundError) for r in results[8:])
        assert [r.ok for r in results] == [r.status is ok for r in results]
        assert all(out.intact() for out in outs)

    def test_taken_keys_in_a_batch(self, store: kvio.Store) -> None:
        """Existing blocks are ``kept``, ``ok`` or ``exists`` as asked, next to new ones."""
        outcomes: tuple[tuple[IfExists, Status, bytes], ...] = (
            ("keep", Status.KEPT, b"old!"),
            ("replace", Status.OK, b"new!"),
            ("error", Status.EXISTS, b"old!"),
        )
        for mode, taken, stands in outcomes:
            store.write_blocks([(f"{mode}/{i}", b"old!") for i in (1, 3)])

            results = store.write_blocks(
                [(f"{mode}/{i}", b"new!") for i in range(5)], if_exists=mode
            )

            assert [r.status for r in results] == [
                taken if i in (1, 3) else Status.OK for i in range(5)
            ]
            assert [bytes(store.read_block(f"{mode}/{i}")) for i in range(5)] == [
                stands if i in (1, 3) else b"new!" for i in range(5)
            ]
            refused = [r for r in results if r.status is Status.EXISTS]
            assert all(isinstance(r.error, kvio.BlockExistsError) for r in refused)
            kept = [r for r in results if r.status is Status.KEPT]
            assert all(r.ok and r.receipt and r.receipt.existed for r in kept)

    def test_one_key_many_times_in_a_batch(self, store: kvio.Store) -> None:
        """A key written several times in one batch holds one of the writes, whole."""
        writes = [("same", payload(5000, i)) for i in range(40)]
        modes: tuple[IfExists, ...] = ("keep", "replace")
        for mode in modes:
            results = store.write_blocks(writes, if_exists=mode)

            assert [r.key for r in results] == ["same"] * 40
            assert all(r.ok for r in results)
            assert bytes(store.read_block("same")) in {data for _, data in writes}

    def test_one_key_is_created_once_in_a_batch(self, store: kvio.Store) -> None:
        """With ``error`` exactly one of several writes of one key succeeds."""
        if not store.capabilities.exclusive_create:
            pytest.skip("the backend does not promise exclusive_create")

        results = store.write_blocks(
            [("same", payload(5000, i)) for i in range(40)], if_exists="error"
        )

        winners = [i for i, r in enumerate(results) if r.ok]
        assert len(winners) == 1
        assert self.holds(store, "same", payload(5000, winners[0]))

    def test_one_key_read_many_times_in_a_batch(self, store: kvio.Store) -> None:
        """One block is read into many buffers by one batch."""
        store.write_block("same", payload(5000, 1))
        outs = [bytearray(5000) for _ in range(40)]

        results = store.read_blocks_into([("same", out) for out in outs])

        assert all(r.ok for r in results)
        assert all(out == payload(5000, 1) for out in outs)

    def test_a_bad_item_stops_a_batch_before_it_starts(self, store: kvio.Store) -> None:
        """An invalid key or buffer anywhere in a batch: an error, and nothing is written."""
        gaps: Any = memoryview(bytearray(8))[::2]
        for key, data, error in (
            ("../key", bytearray(5), kvio.InvalidKeyError),
            ("key", gaps, kvio.BlockSizeError),
            ("key", "text", TypeError),
        ):
            with pytest.raises(error):
                store.write_blocks([("first", b"bytes"), (key, data)])
            with pytest.raises(error):
                store.read_blocks_into([("first", bytearray(5)), (key, data)])
        with pytest.raises(kvio.BlockSizeError):
            store.read_blocks_into([("first", bytearray(5)), ("key", b"read-only")])
        with pytest.raises(kvio.InvalidKeyError):
            store.delete_blocks(["first", ""])

        assert list(store.list_keys()) == []

    def test_batches_of_deletions(self, store: kvio.Store) -> None:
        """Existing blocks are ``ok`` and gone, others are ``missing``."""
        store.write_blocks([(f"block/{i}", b"x") for i in range(40)])

        results = store.delete_blocks([*(f"block/{i}" for i in range(0, 40, 2)), "missing"])

        assert [r.status for r in results] == [Status.OK] * 20 + [Status.MISSING]
        assert sorted(store.list_keys()) == sorted(f"block/{i}" for i in range(1, 40, 2))

    @pytest.mark.kvio_large
    def test_a_batch_of_large_blocks(self, store: kvio.Store) -> None:
        """Large blocks in one batch come back bit for bit."""
        items = [(f"large/{i}", payload(n, i)) for i, n in enumerate(self.large_sizes)]
        outs = [bytearray(len(data)) for _, data in items]

        written = store.write_blocks(items)
        read = store.read_blocks_into([(k, o) for (k, _), o in zip(items, outs, strict=True)])

        assert all(result.ok for result in (*written, *read))
        assert all(out == data for out, (_, data) in zip(outs, items, strict=True))


def cut_writable(out: bytearray) -> list[memoryview]:
    """Cut memory to read into in three, at odd places."""
    view, at = memoryview(out), len(out) // 3
    return [view[:at], view[at : at + 1], view[at + 1 :]]
