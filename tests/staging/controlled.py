"""A store whose writes can be held, failed and reordered, and which notes the order of events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvio
from kvio import MiB
from kvio.abc import Backend
from kvio.staging.draining import SMALL_BYTES
from kvio.testing.fakes import ForwardingBackend, WrappedStore
from kvio.types import Cancellation, IfExists, Level, Parts
from kvio.url import StoreURL

LONG_S = 60.0
SOON_S = 0.02


class ControlledBackend(ForwardingBackend):
    """Blocks in memory; writes wait for the holder of their key, then fail as instructed.

    Attributes:
        events: ("begin" | "stored" | "failed" | "deleted", key), in order.
        level: what receipts say.
        answer: makes the receipt of a write from that of the blocks.
        on_begin: called with the key and the parts of every write, before anything else.
        widest: the most writes of one key that were ever under way at once.
    """

    name = "controlled"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.events: list[tuple[str, str]] = []
        self.level = Level.VISIBLE
        self.widest = 0
        self.answer: Callable[[kvio.Receipt], kvio.Receipt] = _as_it_is
        self.on_begin: Callable[[str, Parts], object] = _nothing
        self._inside: dict[str, int] = {}
        self._moved = threading.Condition()
        self._held: set[str] = set()
        self._faults: list[tuple[str, BaseException]] = []

    def hold(self, *keys: str) -> None:
        """Let writes of these keys hang."""
        with self._moved:
            self._held.update(keys)

    def let_go(self, *keys: str) -> None:
        """Let them go on; without keys, all."""
        with self._moved:
            self._held.difference_update(keys or tuple(self._held))
            self._moved.notify_all()

    def fail(self, key: str, error: BaseException, *, times: int = 1) -> None:
        """Let the next writes of a key fail."""
        with self._moved:
            self._faults += [(key, error)] * times

    def forgive(self) -> None:
        """Let nothing fail any more."""
        with self._moved:
            self._faults.clear()

    def wait_for(self, event: str, key: str, count: int = 1) -> None:
        """Wait until something has happened so many times."""
        with self._moved:
            happened = self._moved.wait_for(
                lambda: self.events.count((event, key)) >= count, LONG_S
            )
        assert happened, (event, key, self.events)

    def order(self, event: str) -> list[str]:
        """Name the keys of one kind of event, in order."""
        return [key for kind, key in self.events if kind == event]

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> kvio.Receipt:
        self.on_begin(key, parts)
        with self._moved:
            self._inside[key] = self._inside.get(key, 0) + 1
            self.widest = max(self.widest, self._inside[key])
            self._note("begin", key)
            self._moved.wait_for(lambda: key not in self._held)
            fault = next((f for f in self._faults if f[0] == key), None)
            if fault is not None:
                self._faults.remove(fault)
        try:
            if fault is not None:
                raise fault[1]
            if cancel is not None and cancel.requested:
                raise kvio.StorageTimeoutError(f"timed out on {key}", key=key)
            receipt = super().write_block(key, parts, if_exists=if_exists, cancel=cancel)
        except BaseException:
            with self._moved:
                self._inside[key] -= 1
                self._note("failed", key)
            raise
        with self._moved:
            self._inside[key] -= 1
            self._note("stored", key)
        return self.answer(receipt._replace(level=self.level))

    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        there = super().delete_block(key, cancel=cancel)
        with self._moved:
            self._note("deleted", key)
        return there

    def peek(self, key: str) -> bytes | None:
        """Look at the blocks without kvio's store."""
        block = self.inner._blocks.get(key)  # type: ignore[attr-defined]  # a memory backend
        return None if block is None else bytes(block.data)

    def _note(self, event: str, key: str) -> None:
        self.events.append((event, key))
        self._moved.notify_all()


def _as_it_is(receipt: kvio.Receipt) -> kvio.Receipt:
    """Answer with what was done."""
    return receipt


def _nothing(_key: str, _parts: Parts) -> None:
    """Let a write begin."""


class Held:
    """A callback that takes its time."""

    def __init__(self) -> None:
        self.entered, self._tier_state = threading.Event(), threading.Event()

    def __call__(self, _: object) -> None:
        self.entered.set()
        assert self._tier_state.wait(LONG_S)

    def let_go(self) -> None:
        """Let it end."""
        self._tier_state.set()


def begin(call: Callable[[], object]) -> threading.Thread:
    """Run something beside the test."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def open_controlled(
    *, level: str = "visible", io_threads: int = 4
) -> WrappedStore[ControlledBackend]:
    """Open a store on such a backend, of a level that it only claims."""
    store = WrappedStore("memory", ControlledBackend, io_threads=io_threads)
    store.wrapper.level = Level(level)
    store._url = StoreURL("memory", "", "", {"durability": level})
    return store


@contextmanager
def staged(
    store: WrappedStore[ControlledBackend], capacity: int | str = "1MiB", **options: Any
) -> Iterator[kvio.StagingTier]:
    """Put a tier before a store; at the end nothing hangs, fails or is left of it."""
    options.setdefault("drain_threads", 2)
    tier = kvio.stage(store, capacity, **options)
    try:
        yield tier
    finally:
        close_without(store, tier)
        store.close(timeout=LONG_S)


def close_without(store: WrappedStore[ControlledBackend], tier: kvio.StagingTier) -> None:
    """Close a tier without what hangs or has failed in its store."""
    store.wrapper.forgive()
    store.wrapper.let_go()
    for receipt in tier.failed:
        tier.discard(receipt)
    tier.close(timeout=LONG_S)


@contextmanager
def draining_with_all(threads: int, **options: Any) -> Iterator[list[int]]:
    """Keep every drain thread of a tier inside a write, past its beginnings; yield their ids."""
    before = set(threading.enumerate())
    keys = [f"held{number}" for number in range(threads)]
    store = open_controlled(io_threads=threads)
    store.wrapper.hold(*keys)
    block = bytes(SMALL_BYTES)  # smaller ones are taken by one thread together
    options |= {"drain_threads": threads, "drain_from": "accept"}
    with staged(store, threads * MiB, **options) as tier:
        for key in keys:
            tier.write_block(key, block)
        for key in keys:
            store.wrapper.wait_for("begin", key)
        new = set(threading.enumerate()) - before
        yield [t.native_id or 0 for t in new if t.name.startswith("kvio-drain")]
        store.wrapper.let_go()
        tier.flush(timeout=LONG_S)
        assert all(store.wrapper.peek(key) == block for key in keys)


def disk_error(key: str = "k") -> kvio.StorageError:
    """Make the error of a disk that fails."""
    return kvio.StorageError(f"write of {key!r}: Input/output error (EIO)", errno=5, key=key)
