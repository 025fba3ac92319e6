"""Compare the backends on one directory, or measure one store: write, read hot, read cold.

Contenders take turns, round by round, each round starting with another one, so that a machine that
slows down slows all of them. Every byte that is read is compared with what was written. This is a
quick look; the comparisons with other software, with plots and verdicts, are in ``benchmarks/`` of
the repository.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvio import _native
from kvio.core.buffers import aligned
from kvio.core.store import Store, open_store
from kvio.errors import ConfigError, StorageError, UnsupportedError
from kvio.types import Durability, KiB, MiB

BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
SIZES: Final = (64 * KiB, MiB, 16 * MiB)
WRITE: Final = "write"
HOT: Final = "read, hot"
COLD: Final = "read, cold"
#: Of a store whose files cannot be seen: from wherever the bytes are.
READ: Final = "read"
_MOST_BLOCKS: Final = 64
_MOST_ROUNDS: Final = 25
#: How often one of two equal stores may be called the faster.
_ALPHA: Final = 0.05
_PREFIX: Final = ".kvio-bench-"

#: A callback with the share of the budget that is spent (0 to 1) and what is measured now.
Report: TypeAlias = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """An open store, and the directory of its files; None: reads cannot be made cold."""

    name: str
    store: Store
    directory: Path | None

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the kinds of reads that can be distinguished."""
        if self.directory is None:
            return (READ,)
        return (HOT, COLD) if _can_drop_cache(self.directory) else (HOT,)


@dataclass(slots=True)
class Measured:
    """One store, block size and operation, with a speed in bytes per second for every round."""

    store: str
    nbytes: int
    operation: str
    bytes_per_s: list[float] = field(default_factory=list)
    modes: dict[str, int] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Return the median over rounds, in bytes per second."""
        return statistics.median(self.bytes_per_s)

    def as_json(self) -> dict[str, Any]:
        """Return what ``kvio bench --json`` prints."""
        return {
            "store": self.store,
            "nbytes": self.nbytes,
            "operation": self.operation,
            "rounds": len(self.bytes_per_s),
            "median_bytes_per_s": self.median,
            "bytes_per_s": self.bytes_per_s,
            "modes": self.modes,
        }


@dataclass(slots=True)
class Comparison:
    """What was measured, in the order of tables, and which backends cannot be used and why."""

    measured: list[Measured]
    left_out: dict[str, str]


def bench(
    target: str,
    *,
    sizes: Sequence[int] = SIZES,
    durability: Durability = "visible",
    budget_s: float = 30.0,
    max_bytes: int = 64 * MiB,
    report: Report | None = None,
) -> Comparison:
    """Measure a directory with every POSIX backend, or the store of a URL alone.

    Nothing is left: backends store in a hidden directory below *target*, and a store keeps none of
    the blocks, whose keys start with ``kvio-bench-``.

    Args:
        target: a directory, or a store URL.
        sizes: of blocks, in bytes.
        durability: of the backends' writes; a URL has its own.
        budget_s: seconds after which no round starts; the first round always runs.
        max_bytes: that a store writes per size and round; at least one block.
        report: called before every step.

    Raises:
        ConfigError: no such directory, or a size below 1.
        StorageError: a byte came back wrong.
    """
    if not sizes or min(sizes) < 1:
        raise ConfigError("sizes must be at least 1 byte")
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        contenders = (
            [_of_url(target, stack)]
            if "://" in target
            else list(_of_directory(Path(target), durability, stack, left_out))
        )
        if not contenders:
            why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise UnsupportedError(f"no backend can be used in {target}: {why}")
        rounds = _Rounds(contenders, sizes, max_bytes, budget_s, report)
        try:
            rounds.run()
        finally:
            rounds.remove()
    return Comparison(list(rounds.measured.values()), left_out)


def _of_url(url: str, stack: ExitStack) -> Contender:
    return Contender(url.partition("?")[0], stack.enter_context(open_store(url)), None)


def _of_directory(
    root: Path, durability: Durability, stack: ExitStack, left_out: dict[str, str]
) -> Iterator[Contender]:
    if not root.is_dir():
        raise ConfigError(f"{root}: no such directory")
    base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, dir=root)))
    for name in BACKENDS:
        own = base / name
        own.mkdir(mode=0o700)
        try:
            store = stack.enter_context(open_store(name, root=own, durability=durability))
        except UnsupportedError as exc:
            left_out[name] = str(exc).replace(str(own), str(root))
        else:
            yield Contender(name, store, own)


class _Rounds:
    """Rounds of writes and reads, within a budget."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        sizes: Sequence[int],
        max_bytes: int,
        budget_s: float,
        report: Report | None,
    ) -> None:
        self.measured: dict[tuple[str, int, str], Measured] = {}
        self._contenders, self._sizes = contenders, sizes
        self._max_bytes, self._budget_s, self._report = max_bytes, budget_s, report
        self._started = time.monotonic()
        self._tag = f"kvio-bench-{uuid.uuid4().hex}"
        largest = max(nbytes * self._blocks(nbytes) for nbytes in sizes)
        self._source, self._target = aligned(largest), aligned(largest)
        self._source[:] = os.urandom(MiB) * (largest // MiB) + os.urandom(largest % MiB)
        for contender in contenders:
            for nbytes in sizes:
                for operation in (WRITE, *contender.reads):
                    key = (contender.name, nbytes, operation)
                    self.measured[key] = Measured(*key)

    def run(self) -> None:
        """Take rounds until the budget is spent."""
        slowest_s = 0.0
        for number in range(_MOST_ROUNDS):
            start = self._spent_s()
            if number and start + slowest_s > self._budget_s:
                return
            for nbytes in self._sizes:
                turn = number % len(self._contenders)
                for contender in (*self._contenders[turn:], *self._contenders[:turn]):
                    if self._report is not None:
                        share = min(1.0, self._spent_s() / max(self._budget_s, 1e-9))
                        self._report(share, f"{contender.name}, round {number + 1}")
                    self._measure(contender, nbytes)
            slowest_s = max(slowest_s, self._spent_s() - start)

    def remove(self) -> None:
        """Delete every block that was written, where the directory is not removed as a whole."""
        for contender in self._contenders:
            if contender.directory is None:
                for nbytes in self._sizes:
                    contender.store.delete_blocks(self._keys(nbytes))

    def _measure(self, contender: Contender, nbytes: int) -> None:
        store, keys = contender.store, self._keys(nbytes)
        pieces = self._pieces(self._source, nbytes)
        with self._timed(contender, nbytes, WRITE):
            for key, piece in zip(keys, pieces, strict=True):
                store.write_block(key, piece, if_exists="replace")
        operations = [
            one for one in (HOT, COLD, READ) if (contender.name, nbytes, one) in self.measured
        ]
        for operation in operations:
            if contender.directory is not None:
                _prepare_caches(contender.directory, hot=operation == HOT)
            self._target[:] = bytes(len(self._target))
            with self._timed(contender, nbytes, operation):
                for key, piece in zip(keys, self._pieces(self._target, nbytes), strict=True):
                    store.read_block_into(key, piece)
            count = nbytes * len(keys)
            if self._source[:count] != self._target[:count]:
                raise StorageError(
                    f"{operation} of {len(keys)} blocks of {nbytes} bytes: other bytes came back",
                    backend=contender.name,
                )

    @contextmanager
    def _timed(self, contender: Contender, nbytes: int, operation: str) -> Iterator[None]:
        one = self.measured[contender.name, nbytes, operation]
        before, start = contender.store.stats().modes, time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        one.bytes_per_s.append(nbytes * self._blocks(nbytes) / seconds)
        for mode, count in contender.store.stats().modes.items():
            if more := count - before.get(mode, 0):
                one.modes[str(mode)] = one.modes.get(str(mode), 0) + more

    def _blocks(self, nbytes: int) -> int:
        return max(1, min(_MOST_BLOCKS, self._max_bytes // nbytes))

    def _keys(self, nbytes: int) -> list[str]:
        return [f"{self._tag}/{nbytes}/{index}" for index in range(self._blocks(nbytes))]

    def _pieces(self, memory: memoryview, nbytes: int) -> list[memoryview]:
        return [memory[i * nbytes : (i + 1) * nbytes] for i in range(self._blocks(nbytes))]

    def _spent_s(self) -> float:
        return time.monotonic() - self._started


def _can_drop_cache(directory: Path) -> bool:
    """Try with a file whether its bytes leave the page cache: not where files are in memory."""
    path = directory / ".cached"
    with path.open("wb", buffering=0) as file:
        file.write(bytes(64 * KiB))
        _native.drop_cache(file.fileno())
        cached = _native.cached_fraction(file.fileno(), 64 * KiB)
    path.unlink()
    return cached is None or cached < 0.01


def _prepare_caches(directory: Path, *, hot: bool) -> None:
    """Bring every file into the page cache, or write it back and drop it."""
    buffer = bytearray(MiB)
    for folder, _, names in os.walk(directory):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if hot:
                    while os.readv(fd, [buffer]):
                        pass
                else:
                    _native.drop_cache(fd)
            finally:
                os.close(fd)


def sentences(found: Sequence[Measured]) -> list[str]:
    """Return for each operation which store was the fastest over all sizes, if rounds show it."""
    result = []
    for operation in dict.fromkeys(one.operation for one in found):
        speeds: dict[str, list[float]] = {}
        for name in dict.fromkeys(one.store for one in found):
            own = [one for one in found if (one.store, one.operation) == (name, operation)]
            if own:
                rounds = zip(*(one.bytes_per_s for one in own), strict=True)
                speeds[name] = [statistics.geometric_mean(each) for each in rounds]
        if len(speeds) > 1:
            result.append(_fastest(operation, speeds))
    return result


def _fastest(operation: str, speeds: Mapping[str, list[float]]) -> str:
    best, second, *_ = sorted(speeds, key=lambda name: -statistics.median(speeds[name]))
    ratio = statistics.median(speeds[best]) / statistics.median(speeds[second])
    rounds = list(zip(speeds[best], speeds[second], strict=True))
    ahead = sum(one > other for one, other in rounds)
    by_chance = sum(math.comb(len(rounds), n) for n in range(ahead, len(rounds) + 1))
    if by_chance / 2 ** len(rounds) > _ALPHA / 2:
        return (
            f"{operation}: no backend is clearly the fastest over all sizes; {best} and {second} "
            f"lead ({ratio:.2f} in {len(rounds)} round{'s' * (len(rounds) > 1)}, {best} ahead in "
            f"{ahead})."
        )
    return (
        f"{operation}: {best} is the fastest over all sizes, at {ratio:.2f} times {second} (ahead "
        f"in {ahead} of {len(rounds)} rounds)."
    )
