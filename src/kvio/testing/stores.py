"""The fixture every part of the suite uses, and short names for what they all check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.testing.hooks import BackendHooks

#: One of every kind of broken key; the text names the rule it breaks.
INVALID_KEYS = (
    *("", "/", "a/", "/a", "a//b", ".", "..", "../a", "a/../b", "a/./b", ".hidden", "a/.b"),
    *("-a", "a b", "a\n", "a\0b", "a\\b", "a:b", "a~b", "a%2Fb", "ключ", "a" * 201, "é", "*", "a?"),
)


class StoreTests(BackendHooks):
    """A new store for every test."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[kvio.Store]:
        """Open the store under test, and close it."""
        opened = self.open_now(tmp_path)
        yield opened
        opened.close()

    def holds(self, store: kvio.Store, key: str, data: bytes) -> bool:
        """Check that a block reads back as *data*, and is stored as such."""
        if self.has_hook("raw_get") and self.raw_get(store, key) != data:
            return False
        return bytes(store.read_block(key)) == data


def level_of(store: kvio.Store) -> kvio.Level:
    """Return the level a store was opened with."""
    return kvio.Level(str(store.url.options.get("durability", "visible")))
