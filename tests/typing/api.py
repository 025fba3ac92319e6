"""A consumer that uses the public API as its types allow; checked by mypy, never run."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import assert_type

import numpy as np

import kvio


def whole(root: Path) -> None:
    """Use every verb of a store."""
    with kvio.open_store("hybrid", root=root, durability="durable", timeout=5.0) as store:
        assert_type(store, kvio.Store)
        receipt = store.write_block("key", b"bytes", if_exists="replace")
        assert_type(store.write_file("key", "path", move=True), kvio.Receipt)
        with store.open_writer("key") as writer:
            assert_type(writer, kvio.BlockWriter)
            assert_type(writer.receipt, kvio.Receipt | None)
        with store.open_reader("key") as reader:
            assert_type(reader, kvio.BlockReader)
        assert_type(receipt, kvio.Receipt)
        assert_type(receipt.checksum, int | None)
        assert_type(receipt.level >= kvio.Level.VISIBLE, bool)
        assert_type(receipt.mode, kvio.IOMode)
        assert_type(store.read_block_into("key", bytearray(5), offset=1), int)
        assert_type(store.read_block_into("key", [np.empty(5), bytearray(5)]), int)
        assert_type(bytes(store.read_block("key", nbytes=3)), bytes)
        results = store.write_blocks([("a", b"bytes"), ("b", np.zeros(5))])
        assert_type(results, list[kvio.BlockResult])
        assert_type(results[0].error, kvio.KvioError | None)
        assert_type(results[0].ok, bool)
        assert_type(store.read_blocks_into((k, bytearray(5)) for k in "ab")[0].nbytes, int)
        assert_type(store.delete_blocks(["a"])[0].status, kvio.BlockStatus)
        assert_type(store.submit_write("key", b"bytes"), Future[kvio.Receipt])
        assert_type(store.submit_read_into("key", bytearray(5)), Future[int])
        assert_type(store.stat_block("key").mtime_ns, int | None)
        assert_type(store.contains("key"), bool)
        assert_type(store.count_leading(["a", "b"]), int)
        assert_type([*store.list_keys("prefix/")], list[str])
        assert_type(store.delete_block("key"), bool)
        assert_type(store.capabilities.durable_write, bool)
        assert_type(store.stats().bytes_written, int)
        store.flush(timeout=1)
    assert_type(kvio.backend_names(), list[str])


async def awaited(store: kvio.Store) -> None:
    """Use the awaited verbs."""
    async with kvio.AsyncStore(store) as waiting:
        assert_type(waiting, kvio.AsyncStore)
        assert_type(await waiting.write_block("key", b"bytes"), kvio.Receipt)
        assert_type(await waiting.write_file("key", "path", move=True), kvio.Receipt)
        assert_type(await waiting.read_block_into("key", bytearray(5)), int)
        assert_type([key async for key in waiting.list_keys()], list[str])


async def awaited_tier(tier: kvio.StagingTier) -> None:
    """The awaited verbs of a tier have its receipts, which can be awaited in turn."""
    async with kvio.AsyncStore(tier) as waiting:
        receipt = await waiting.write_block("key", b"bytes")
        assert_type(receipt, kvio.StagedReceipt)
        assert_type(await receipt, kvio.Receipt)
        assert_type(waiting.stats(), kvio.TierStats)


def errors(store: kvio.Store) -> str | None:
    """Catch errors by their types and read their attributes."""
    try:
        store.read_block("key")
    except kvio.CorruptBlockError as exc:
        return exc.key
    except kvio.StorageError as exc:
        assert_type(exc.errno, int | None)
        return exc.backend
    return None


asyncio.run(awaited(kvio.open_store("memory")))
