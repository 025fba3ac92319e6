"""Submitted work, awaited work, deadlines that are kept, and counts that add up."""

from __future__ import annotations

import asyncio
from concurrent.futures import wait

import pytest

import kvio
from kvio.testing.hooks import StoreTests
from kvio.testing.payloads import Guarded, payload

#: Far more than any call here takes, even on a busy machine.
_GENEROUS_S = 120.0


class SubmittedTests(StoreTests):
    """The promises of `submit_write`, `submit_read_into`, `AsyncStore`, ``timeout`` and `stats`."""

    def test_submitted_work_gives_what_single_calls_give(self, store: kvio.Store) -> None:
        """Futures hold the receipts and counts of single calls, in any order of completion."""
        items = {f"block/{i}": payload(i * 501, i) for i in range(60)}

        writes = {key: store.submit_write(key, data) for key, data in items.items()}
        receipts = {key: future.result(_GENEROUS_S) for key, future in writes.items()}
        outs = {key: Guarded(len(data), misalign=1) for key, data in items.items()}
        reads = {key: store.submit_read_into(key, out.view) for key, out in outs.items()}

        for key, data in items.items():
            assert (receipts[key].key, receipts[key].nbytes) == (key, len(data))
            assert reads[key].result(_GENEROUS_S) == len(data)
            assert outs[key].view == data
            assert outs[key].intact()

    def test_errors_come_through_the_future(self, store: kvio.Store) -> None:
        """The future raises what a single call would; what needs no I/O is raised at once."""
        store.write_block("taken", b"bytes")

        missing = store.submit_read_into("missing", bytearray(5))
        taken = store.submit_write("taken", b"other", if_exists="error")
        small = store.submit_read_into("taken", bytearray(2))

        assert isinstance(missing.exception(_GENEROUS_S), kvio.BlockNotFoundError)
        assert isinstance(taken.exception(_GENEROUS_S), kvio.BlockExistsError)
        assert isinstance(small.exception(_GENEROUS_S), kvio.BlockSizeError)
        with pytest.raises(kvio.BlockSizeError):
            store.submit_read_into("taken", b"read-only")
        with pytest.raises(TypeError):
            store.submit_write("key", "text")

    def test_submitted_ranges_are_slices(self, store: kvio.Store) -> None:
        """A submitted range read gives the slice that was asked for."""
        data = payload(70_000, 1)
        store.write_block("block", data)
        out = Guarded(4097, misalign=3)

        future = store.submit_read_into("block", out.view, offset=4095, nbytes=4097)

        assert future.result(_GENEROUS_S) == 4097
        assert out.view == data[4095 : 4095 + 4097]

    def test_flush_waits_for_what_was_submitted(self, store: kvio.Store) -> None:
        """After `flush` every future is done and every block readable."""
        futures = [store.submit_write(f"block/{i}", payload(5000, i)) for i in range(40)]

        store.flush()

        assert all(future.done() for future in futures)
        assert store.count_leading(f"block/{i}" for i in range(40)) == 40

    def test_awaited_calls_give_what_plain_calls_give(self, store: kvio.Store) -> None:
        """Every verb of `AsyncStore` agrees with the same verb of `Store`."""
        data = payload(9000, 1)
        out, part = bytearray(9000), bytearray(100)

        async def work() -> None:
            waiting = kvio.AsyncStore(store)
            receipt = await waiting.write_block("a", data)
            assert (receipt.key, receipt.nbytes, receipt.existed) == ("a", 9000, False)
            assert (await waiting.write_block("a", data)).existed
            assert await waiting.read_block_into("a", out) == 9000
            assert await waiting.read_block_into("a", part, offset=7) == 100
            assert await waiting.read_block("a") == data
            results = await waiting.write_blocks([("a", data), ("b", b"bytes")])
            assert [r.status for r in results] == ["kept", "ok"]
            found = await waiting.read_blocks_into([("b", bytearray(5)), ("c", bytearray(5))])
            assert [r.status for r in found] == ["ok", "missing"]
            assert await waiting.stat_block("a") == store.stat_block("a")
            assert await waiting.contains("a")
            assert not await waiting.contains("c")
            assert await waiting.count_leading(["a", "b", "c"]) == 2
            assert (await waiting.verify_block("a")).ok
            assert sorted([key async for key in waiting.list_keys()]) == ["a", "b"]
            assert await waiting.delete_block("a")
            assert [r.status for r in await waiting.delete_blocks(["a", "b"])] == ["missing", "ok"]
            await waiting.flush()
            assert waiting.capabilities == store.capabilities
            assert waiting.stats() == store.stats()
            with pytest.raises(kvio.BlockNotFoundError):
                await waiting.read_block_into("a", out)
            with pytest.raises(kvio.InvalidKeyError):
                await waiting.write_block("../a", data)

        asyncio.run(work())
        assert out == data
        assert part == data[7:107]

    def test_many_tasks_at_once(self, store: kvio.Store) -> None:
        """Dozens of tasks write and read blocks concurrently."""

        async def one(waiting: kvio.AsyncStore, i: int) -> bytes:
            await waiting.write_block(f"task/{i}", payload(3000, i))
            return bytes(await waiting.read_block(f"task/{i}"))

        async def all_of_them() -> list[bytes]:
            waiting = kvio.AsyncStore(store)
            return await asyncio.gather(*(one(waiting, i) for i in range(40)))

        assert asyncio.run(all_of_them()) == [payload(3000, i) for i in range(40)]

    def test_leaving_an_async_store_closes_it(self, store: kvio.Store) -> None:
        """``async with`` closes the store beneath at its end."""

        async def work() -> None:
            async with kvio.AsyncStore(store) as waiting:
                await waiting.write_block("block", b"bytes")

        asyncio.run(work())

        with pytest.raises(kvio.StoreClosedError):
            store.contains("block")

    def test_a_generous_timeout_changes_no_answer(self, store: kvio.Store) -> None:
        """With time to spare, every verb answers as it does without a limit."""
        data, limit = payload(70_000, 1), _GENEROUS_S
        out, part, pieces = Guarded(70_000), Guarded(10), [bytearray(9), bytearray(69_991)]

        assert not store.write_block("a", data, timeout=limit).existed
        assert store.write_block("a", data, timeout=limit).existed
        assert store.read_block_into("a", out.view, timeout=limit) == 70_000
        assert store.read_block_into("a", pieces, timeout=limit) == 70_000
        assert store.read_block_into("a", part.view, offset=5, timeout=limit) == 10
        assert store.read_block("a", timeout=limit) == data
        assert store.read_block("a", offset=5, nbytes=10, timeout=limit) == data[5:15]
        assert store.stat_block("a", timeout=limit) == store.stat_block("a")
        assert store.contains("a", timeout=limit)
        assert store.verify_block("a", timeout=limit).ok
        assert store.count_leading(["a", "b"], timeout=limit) == 1
        written = store.write_blocks([("a", data), ("b", b"bytes")], timeout=limit)
        read = store.read_blocks_into(
            [("b", short := bytearray(9)), ("c", bytearray(5)), ("a", bytearray(5))], timeout=limit
        )
        assert store.submit_write("d", b"bytes", timeout=limit).result(limit).nbytes == 5
        assert store.submit_read_into("d", part.view, timeout=limit).result(limit) == 5
        store.flush(timeout=limit)
        deleted = store.delete_blocks(["b", "c"], timeout=limit)
        assert store.delete_block("a", timeout=limit)

        assert out.view == data
        assert b"".join(pieces) == data
        assert [r.status for r in written] == ["kept", "ok"]
        assert [r.status for r in read] == ["short", "missing", "failed"]
        assert short[:5] == b"bytes"
        assert [r.status for r in deleted] == ["ok", "missing"]
        assert out.intact()
        assert part.intact()

    def test_a_timed_call_raises_what_an_untimed_one_does(self, store: kvio.Store) -> None:
        """Misses, taken keys and small buffers are the same errors under a timeout."""
        store.write_block("block", b"bytes")
        for error, call in (
            (kvio.BlockNotFoundError, lambda: store.read_block("missing", timeout=_GENEROUS_S)),
            (
                kvio.BlockSizeError,
                lambda: store.read_block_into("block", bytearray(4), timeout=_GENEROUS_S),
            ),
            (
                kvio.BlockExistsError,
                lambda: store.write_block("block", b"x", if_exists="error", timeout=_GENEROUS_S),
            ),
        ):
            with pytest.raises(error):
                call()

    def test_counts_add_up(self, store: kvio.Store) -> None:
        """`stats` counts each block once by how it ended, and the bytes that moved."""
        store.write_block("a", payload(1000))
        store.write_block("a", payload(1000))
        store.write_blocks([("b", payload(10)), ("c", payload(20)), ("a", payload(1000))])
        store.submit_write("d", payload(5)).result(_GENEROUS_S)
        with pytest.raises(kvio.BlockExistsError):
            store.write_block("a", b"x", if_exists="error")
        store.read_block("a")
        store.read_blocks_into([("b", bytearray(10)), ("missing", bytearray(10))])
        with pytest.raises(kvio.BlockNotFoundError):
            store.read_block_into("missing", bytearray(1))
        wait([store.submit_read_into("c", bytearray(20))])
        store.delete_block("d")
        store.delete_blocks(["c", "missing"])
        store.flush()

        stats = store.stats()

        assert (stats.writes, stats.kept, stats.bytes_written) == (7, 2, 1035)
        assert (stats.reads, stats.missing, stats.bytes_read) == (5, 2, 1030)
        assert sum(stats.modes.values()) in (0, 7)  # 4 written, 3 read; or no modes here
        assert stats.deletes == 3
        assert (stats.corrupt, stats.timeouts, stats.queued_bytes) == (0, 0, 0)
