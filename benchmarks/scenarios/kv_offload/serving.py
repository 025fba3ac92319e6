"""Serve one request: look up its prefix, load the hits, offload the misses."""

from __future__ import annotations

import importlib.util
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from benchmarks.harness.blocks import Block
from benchmarks.scenarios.kv_offload.requests import Request
from kvio.types import Durability

#: What is done for a request, in this order.
LOOKUP: Final = "lookup"
LOAD: Final = "load"
OFFLOAD: Final = "offload"

#: Keys, each with the pieces of its block.
Items: TypeAlias = Sequence[tuple[str, Sequence[Any]]]


class Offloader(Protocol):
    """Keeps blocks of several pieces below one directory; used by several threads at once."""

    def count_leading(self, keys: Sequence[str]) -> int:
        """Count how many keys from the front are stored."""

    def load(self, items: Items) -> int:
        """Fill the pieces of every block and count the bytes that came."""

    def offload(self, items: Items) -> Counter[str]:
        """Store every block and count them by I/O mode, where that is known."""

    def modes(self) -> Counter[str]:
        """Count blocks by I/O mode since it was opened, where that is known."""

    def close(self) -> None:
        """Release what is held."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a call began and ended, how many blocks it moved, and how."""

    start_s: float
    end_s: float
    blocks: int
    modes: Counter[str]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Served:
    """The result of one request; *late_s* is how long it waited for a free thread."""

    hits: int
    late_s: float
    spans: dict[str, Span]


def serve(
    offloader: Offloader,
    source: dict[str, Block],
    request: Request,
    mine: Sequence[Block],
    arrival_s: float,
    claimed: dict[str, object],
) -> Served:
    """Serve one request; only the three calls are timed, not what is prepared between them.

    It arrives at *arrival_s* of ``time.perf_counter``, or is there (0), and loads into memory of
    its own, *mine*. Another request is offloading, or has offloaded, the keys in *claimed*: as in
    an engine, no other does so again, and every contender gets the same bytes.
    """
    wait_s = arrival_s - time.perf_counter()
    if wait_s > 0:
        time.sleep(wait_s)
    start = time.perf_counter()
    hits = offloader.count_leading(request.keys)
    spans = {LOOKUP: Span(start, time.perf_counter(), 0, Counter())}
    late_s = start - arrival_s if arrival_s else 0.0
    # More hits than there ever were blocks shows in the lookup; there is no memory for them.
    loads = [(k, to.pieces) for k, to in zip(request.keys[:hits], mine, strict=False)]
    own = object()
    misses = [k for k in request.keys[hits:] if claimed.setdefault(k, own) is own]
    if loads:
        nbytes = sum(piece.nbytes for _, pieces in loads for piece in pieces)
        start = time.perf_counter()
        got = offloader.load(loads)
        end = time.perf_counter()
        spans[LOAD] = Span(start, end, len(loads), Counter(), whole=got == nbytes)
    if misses:
        items = [(key, source[key].pieces) for key in misses]
        start = time.perf_counter()
        modes = offloader.offload(items)
        spans[OFFLOAD] = Span(start, time.perf_counter(), len(misses), modes)
    return Served(hits, late_s, spans)


def busy_s(spans: Sequence[Span]) -> float:
    """Return the time in which at least one of the calls was under way."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda one: one.start_s):
        total += max(0.0, span.end_s - max(span.start_s, until))
        until = max(until, span.end_s)
    return total


Open: TypeAlias = Callable[[Path, Durability, int], Offloader]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to keep blocks.

    Attributes:
        package: what pip and ``import`` know it by, or None where kvio or Python is enough.
        checksum: of every block is stored, and verified by every load.
        guarantee: how a block appears, what is checked, and what is synchronised.
        open: on an empty directory, for a durability and so many threads that call it at the
            same time, and as many that do its I/O where it has any; `UnsupportedError` where it
            cannot be.
    """

    name: str
    package: str | None = None
    checksum: bool = False
    guarantee: str
    open: Open

    def missing(self) -> str | None:
        """Return why it cannot take part here; None where it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"not installed: pip install {self.package}"
        return None


class Unreported:
    """Reports no I/O modes and holds nothing that must be released."""

    def modes(self) -> Counter[str]:
        """Count nothing."""
        return Counter()

    def close(self) -> None:
        """Do nothing."""


def scatter(value: Any, pieces: Sequence[Any]) -> int:
    """Copy bytes into the pieces in order; count those that there were."""
    view = memoryview(value).cast("B")
    done = 0
    for piece in pieces:
        part = view[done : done + piece.nbytes]
        memoryview(piece)[: part.nbytes] = part
        done += part.nbytes
    return done


def sync(path: str) -> None:
    """Wait until a file or a directory is on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
