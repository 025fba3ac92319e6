"""Blocks that another writer replaces between the question for their length and their reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvio
from kvio.abc import Backend
from kvio.testing.fakes import ForwardingBackend, WrappedStore
from kvio.testing.payloads import payload
from kvio.types import BlockStat, Cancellation, MiB

#: More than what a range gets without asking how much there is.
LARGE = 16 * MiB + 1


class Racing(ForwardingBackend):
    """Has another writer do something after each time a block's length was asked for."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.race: Callable[[int], None] = lambda _: None
        self.asked = 0

    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        found = super().stat_block(key, cancel=cancel)
        self.asked += 1
        self.race(self.asked)
        return found

    def place(self, nbytes: int) -> None:
        self.inner.write_block("key", [memoryview(payload(nbytes, nbytes))], if_exists="replace")


@pytest.fixture(params=["memory", "posix-tmpfile", "posix-direct"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WrappedStore[Racing]]:
    """Open a store whose blocks are replaced as a test says."""
    url = "memory://" if request.param == "memory" else f"{request.param}://{tmp_path}"
    with WrappedStore(url, Racing) as opened:
        yield opened


def test_a_block_that_grows_each_time_it_is_asked_for_is_read(store: WrappedStore[Racing]) -> None:
    """However often it grows by a little, one of its versions comes, whole."""
    store.wrapper.place(100_000)
    store.wrapper.race = lambda time: store.wrapper.place(100_000 + time)

    assert store.read_block("key") == payload(100_002, 100_002)
    assert store.wrapper.asked == 2


def test_a_block_that_shrinks_is_read_whole(store: WrappedStore[Racing]) -> None:
    """What comes has the length of what was read, not of what was asked for first."""
    store.wrapper.place(100_000)
    store.wrapper.race = lambda _: store.wrapper.place(70)

    assert store.read_block("key") == payload(70, 70)


def test_a_block_that_outgrows_every_room_is_given_up(store: WrappedStore[Racing]) -> None:
    """The error says how often; nothing of the block is returned."""
    store.wrapper.place(1)
    store.wrapper.race = lambda time: store.wrapper.place(3**time)

    with pytest.raises(kvio.BlockSizeError, match="replaced by a larger one 8 times"):
        store.read_block("key")


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(5, None), (0, LARGE), (5, LARGE)], ids=["rest", "head", "middle"]
)
def test_a_range_ends_early_only_where_the_block_ends(
    store: WrappedStore[Racing], offset: int, nbytes: int | None
) -> None:
    """A range never has the length of one version and the bytes of another."""
    store.wrapper.place(100_000)
    store.wrapper.race = lambda time: store.wrapper.place(100_000 + time)

    got = store.read_block("key", offset=offset, nbytes=nbytes)

    assert got == payload(100_002, 100_002)[offset:]
