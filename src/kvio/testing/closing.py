"""Closing a store, its capabilities and its repr."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvio
from kvio.testing.hooks import StoreTests, level_of
from kvio.testing.payloads import payload


class ClosingTests(StoreTests):
    """The promises of `close` and `capabilities`."""

    def test_a_closed_store_refuses_every_call(self, store: kvio.Store) -> None:
        """After `close` every verb raises StoreClosedError; closing again does nothing."""
        store.write_block("block", b"bytes")
        store.close()
        store.close()

        for call in (
            lambda: store.write_block("block", b"bytes"),
            lambda: store.read_block("block"),
            lambda: store.read_block_into("block", bytearray(5)),
            lambda: store.read_block_into("block", bytearray(5), timeout=60.0),
            lambda: store.write_blocks([("block", b"bytes")]),
            lambda: store.read_blocks_into([("block", bytearray(5))]),
            lambda: store.delete_blocks(["block"]),
            lambda: store.delete_block("block"),
            lambda: store.stat_block("block"),
            lambda: store.contains("block"),
            lambda: store.verify_block("block"),
            lambda: store.count_leading(["block"]),
            lambda: list(store.list_keys()),
            lambda: store.submit_write("block", b"bytes"),
            lambda: store.submit_read_into("block", bytearray(5)),
            lambda: store.flush(),
            lambda: store.sweep(),
        ):
            with pytest.raises(kvio.StoreClosedError):
                call()

    def test_closing_finishes_what_was_submitted(self, store: kvio.Store) -> None:
        """Work that was accepted before `close` ends well."""
        futures = [store.submit_write(f"block/{i}", payload(9000, i)) for i in range(40)]

        store.close()

        assert [future.result(0).nbytes for future in futures] == [9000] * 40

    def test_a_listing_ends_when_its_store_is_closed(self, store: kvio.Store) -> None:
        """A listing in progress raises StoreClosedError at its next key."""
        store.write_blocks([(f"block/{i}", b"x") for i in range(10)])
        keys = store.list_keys()
        next(keys)
        store.close()

        with pytest.raises(kvio.StoreClosedError):
            next(keys)

    def test_with_closes_the_store(self, tmp_path: Path) -> None:
        """A store is a context manager that closes itself, also when its block raises."""
        with pytest.raises(ZeroDivisionError), self.open_now(tmp_path) as store:
            store.write_block("block", bytes(1 // 0))

        with pytest.raises(kvio.StoreClosedError):
            store.contains("block")

    def test_capabilities_are_promises_in_the_positive(self, store: kvio.Store) -> None:
        """Capabilities are immutable, name the storage, and allow the level that was asked for."""
        capabilities = store.capabilities

        assert capabilities.atomic_write
        assert capabilities.medium
        assert capabilities.memory_alignment >= 1
        assert level_of(store) is not kvio.Level.DURABLE or capabilities.durable_write
        with pytest.raises(AttributeError):
            capabilities.shared = True  # type: ignore[misc]

    def test_repr_says_what_is_open(self, store: kvio.Store) -> None:
        """A store's repr names its backend and whether it is open."""
        before = repr(store)
        store.close()

        assert store.url.scheme in before
        assert before != repr(store)
