"""The hooks of a test class: how to open a store, and how to reach its storage directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import pytest

import kvio
from kvio.testing.payloads import LARGE_SIZES, SIZES


class Damage(StrEnum):
    """Kinds of damage to stored bytes behind a store's back."""

    TRUNCATED = "truncated"
    EMPTIED = "emptied"
    ZEROED = "zeroed"
    FOREIGN = "foreign"
    LAST_BIT = "last bit flipped"
    PAYLOAD_BIT = "payload bit flipped"

    def apply(self, stored: bytes) -> bytes:
        """Damage the stored bytes of one block."""
        match self:
            case Damage.TRUNCATED:
                return stored[: len(stored) // 2]
            case Damage.EMPTIED:
                return b""
            case Damage.ZEROED:
                return bytes(len(stored))
            case Damage.FOREIGN:
                return b"not written by kvio\n" * 50
            case Damage.LAST_BIT:
                return stored[:-1] + bytes([stored[-1] ^ 1])
            case Damage.PAYLOAD_BIT:
                return bytes([stored[0] ^ 128]) + stored[1:]


class BackendHooks:
    """Open stores, and reach their storage without kvio's code.

    Only `open` is needed. Tests that need another hook skip and say which.

    Attributes:
        sizes, large_sizes: payload lengths in bytes that the size tests go through.
        nested_keys: ``a`` and ``a/b`` can both be blocks.
        rounds: how often racing threads write.
    """

    sizes: ClassVar[Sequence[int]] = SIZES
    large_sizes: ClassVar[Sequence[int]] = LARGE_SIZES
    nested_keys: ClassVar[bool] = True
    rounds: ClassVar[int] = 25

    def open(self, tmp_path: Path) -> kvio.Store | str:
        """Open a store, or return its URL; it is empty when first opened in *tmp_path*.

        Opened a second time in the same directory, a shared backend shows the same blocks.
        """
        raise NotImplementedError

    def raw_get(self, store: kvio.Store, key: str) -> bytes | None:
        """Return a block's payload from the storage itself; None if it is missing."""
        raise NotImplementedError

    def raw_stored(self, store: kvio.Store, key: str) -> bytes:
        """Return all stored bytes of a block, with trailer and padding."""
        raise NotImplementedError

    def raw_put(self, store: kvio.Store, key: str, stored: bytes) -> None:
        """Replace the stored bytes of a block."""
        raise NotImplementedError

    def raw_leftovers(self, store: kvio.Store) -> list[str]:
        """Return the names in the storage that are not blocks."""
        raise NotImplementedError

    def detects(self, store: kvio.Store) -> frozenset[Damage]:
        """Return the kinds of damage that this store must notice."""
        return frozenset(Damage) if store.capabilities.checksum else frozenset()

    def has_hook(self, name: str) -> bool:
        """Return whether a subclass has a hook."""
        return getattr(type(self), name) is not getattr(BackendHooks, name)

    def require(self, *names: str) -> None:
        """Skip the running test unless a subclass has these hooks."""
        missing = [name for name in names if not self.has_hook(name)]
        if missing:
            pytest.skip(f"{type(self).__name__} has no hook {', '.join(missing)}")

    def damage(self, store: kvio.Store, key: str, how: Damage) -> None:
        """Damage a stored block behind the store's back."""
        self.raw_put(store, key, how.apply(self.raw_stored(store, key)))

    def open_now(self, tmp_path: Path) -> kvio.Store:
        """Open a store, whether `open` returns one or a URL."""
        opened = self.open(tmp_path)
        return kvio.open_store(opened) if isinstance(opened, str) else opened


# --------------------------------------------------------------------------------------------------
# The fixture every part of the suite uses, and short names for what they all check.


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
