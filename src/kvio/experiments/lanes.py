"""The contenders of the hybrid experiment: kvio in one I/O mode each, and plain streams."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np

import kvio
from kvio import UnsupportedError, tuning
from kvio.experiments import page_cache
from kvio.experiments.measure import COLD, HOT, WRITE, WRITTEN_BACK, Sample, Timed, time_calls
from kvio.experiments.run import Limits
from kvio.policies import Calibration, Step
from kvio.types import IOMode

Verb: TypeAlias = Literal["write", "read"]
Call: TypeAlias = Callable[[], Any]

CALIBRATED: Final = "hybrid calibrated"
#: Every contender's name, in the order of tables.
LANES: Final = (
    "buffered", "dontcache", "direct", "unaligned 1 thread", "unaligned",
    "hybrid", CALIBRATED, "buffered stream", "direct stream",
)  # fmt: skip
_BACKENDS: Final = {"buffered": "posix-tmpfile", "dontcache": "hybrid"}
_MAX_BLOCKS: Final = 64
_ALL_DIRECTORIES: Final[dict[str, Any]] = {"create": True, "durability": "durable"}
_SCRATCH: Final = ".scratch"
_SEED: Final = 20260102
_MISALIGNED_BY: Final = 33


class Mover(Protocol):
    """Writes pieces of memory to a medium and reads them back, one call a piece."""

    def calls(self, verb: Verb, pieces: Sequence[memoryview], tag: str) -> list[Call]:
        """Make the calls; *tag* tells turns apart."""

    def modes(self) -> Counter[str]:
        """Count calls by the I/O mode so far, where it is known."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One contender: writes, settles, reads cold and reads hot, a sample each."""

    name: str
    root: Path
    max_bytes: int
    mover: Mover
    misaligned_by: int = 0

    def turn(self, nbytes: int, index: int) -> Iterator[Sample]:
        """Take one turn at a size; leaves empty files, since deleting makes new ones slow."""
        count = max(1, min(_MAX_BLOCKS, self.max_bytes // nbytes))
        source, target = self._memory(count * nbytes), self._memory(count * nbytes)
        _fill(source)
        sample = partial(
            Sample,
            subject="one file" if isinstance(self.mover, Stream) else "one block a file",
            block_nbytes=nbytes,
            contender=self.name,
            checksum=False,
            round=index,
        )
        page_cache.touch_memory(self.root / _SCRATCH, source)
        os.sync()
        timed, modes = self._move("write", source, nbytes, index)
        start = time.perf_counter()
        os.sync()
        settled_s = timed.wall_s + time.perf_counter() - start
        for operation, wall_s in ((WRITE, timed.wall_s), (WRITTEN_BACK, settled_s)):
            yield sample(
                operation=operation, wall_s=wall_s, latencies_s=timed.latencies_s, modes=modes
            )
        for operation in (COLD, HOT):
            page_cache.drop(self.root)
            if operation == HOT:
                page_cache.warm(self.root)
            np.frombuffer(target, np.uint8)[:] = 0
            cached = page_cache.cached_fraction(self.root)
            timed, modes = self._move("read", target, nbytes, index)
            yield sample(
                operation=operation,
                wall_s=timed.wall_s,
                latencies_s=timed.latencies_s,
                modes=modes,
                cached_before=cached,
                intact=_same(source, target),
            )
        _empty(self.root)

    def _memory(self, nbytes: int) -> memoryview:
        return kvio.aligned_buffer(nbytes + self.misaligned_by)[self.misaligned_by :]

    def _move(
        self, verb: Verb, memory: memoryview, nbytes: int, index: int
    ) -> tuple[Timed[Any], dict[str, int]]:
        pieces = [memory[at : at + nbytes] for at in range(0, len(memory), nbytes)]
        before = self.mover.modes()
        timed = time_calls(
            self.mover.calls(verb, pieces, f"{_key(self.name)}/{index}/{nbytes}"), threads=1
        )
        return timed, dict(self.mover.modes() - before)


class Blocks:
    """A block a file through one kvio store."""

    def __init__(self, store: kvio.Store) -> None:
        self._store = store

    def calls(self, verb: Verb, pieces: Sequence[memoryview], tag: str) -> list[Call]:
        """Make one call of the public interface a piece."""
        call = self._store.write_block if verb == "write" else self._store.read_block_into
        return [partial(call, f"{tag}/{i}", piece) for i, piece in enumerate(pieces)]

    def modes(self) -> Counter[str]:
        """Count blocks by mode."""
        return Counter(self._store.stats().modes)


class Stream:
    """One long file by pwrite and preadv, written over and over.

    Raises:
        UnsupportedError: the medium has no direct I/O.
    """

    def __init__(self, root: Path, stack: ExitStack, *, direct: bool) -> None:
        path = root / ("direct" if direct else "buffered")
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as exc:
            raise UnsupportedError(f"open the stream: {exc.strerror}") from exc
        stack.callback(os.close, self._fd)

    def calls(self, verb: Verb, pieces: Sequence[memoryview], _: str) -> list[Call]:
        """Make one system call a piece, the one behind the other in the file."""
        call = os.pwritev if verb == "write" else os.preadv
        return [partial(call, self._fd, [p], i * len(p)) for i, p in enumerate(pieces)]

    def modes(self) -> Counter[str]:
        """Count nothing: the mode is in the name."""
        return Counter()


def open_lanes(
    base: Path, names: Sequence[str], limits: Limits, *, tune_s: float, stack: ExitStack
) -> dict[str, Lane | str]:
    """Open the named contenders below *base*, or say why one cannot be."""
    lanes: dict[str, Lane | str] = {}
    blocks, streams = base / "blocks", base / "streams"
    # All blocks go to the same directories: on some file systems one is slower than the next.
    # A durable store makes them all when it opens, so that no turn has to.
    try:
        kvio.open_store("posix-tmpfile", root=blocks, options=_ALL_DIRECTORIES).close()
    except UnsupportedError:
        blocks.mkdir(mode=0o700, exist_ok=True)
    streams.mkdir(mode=0o700)
    for name in names:
        try:
            if name.endswith("stream"):
                stream = Stream(streams, stack, direct=name.startswith("direct"))
                lanes[name] = Lane(name, streams, limits.max_bytes, stream)
            else:
                lanes[name] = _open_lane(name, blocks, limits, tune_s, stack)
        except UnsupportedError as exc:
            lanes[name] = str(exc).replace(str(base), "…")
    return lanes


def _open_lane(name: str, root: Path, limits: Limits, tune_s: float, stack: ExitStack) -> Lane:
    calibration = None  # a store reads it when it opens
    if name == CALIBRATED:
        calibrated = tuning.tune(str(root), budget_s=max(tune_s, 1.0), max_bytes="4GiB")
        calibration = tuning.save(str(root), calibrated)
    if name == "dontcache":
        always: dict[int, tuple[Step, ...]] = {1: (Step(None, IOMode.DONTCACHE),)}
        alone = tuning.Tuning(Calibration(always, always, "dontcache alone"), {})
        calibration = tuning.save(str(root), alone)
    backend = "hybrid" if name.startswith("hybrid") else _BACKENDS.get(name, "posix-direct")
    settings: dict[str, Any] = {"io_threads": 1} if name.endswith("1 thread") else {}
    try:
        store = kvio.open_store(
            backend, root=root, options={"checksum": "none", "verify": "length"}, **settings
        )
    finally:
        if calibration:
            os.unlink(calibration)
    stack.callback(store.close)
    shift = _MISALIGNED_BY if "unaligned" in name else 0
    return Lane(name, root, limits.max_bytes, Blocks(store), shift)


def _key(name: str) -> str:
    return name.replace(" ", "-")


def _fill(memory: memoryview) -> None:
    pattern = np.random.default_rng(_SEED).integers(0, 256, 1 << 20, np.uint8)
    whole = np.frombuffer(memory, np.uint8)
    for at in range(0, len(whole), len(pattern)):
        whole[at : at + len(pattern)] = pattern[: len(whole) - at]
        pattern[0] += 1  # no two pieces are alike


def _same(left: memoryview, right: memoryview) -> bool:
    return bool(np.array_equal(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)))


def _empty(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for file in files:
            if not file.startswith("."):
                os.truncate(os.path.join(directory, file), 0)
