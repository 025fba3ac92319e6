"""How a request is served by whatever keeps the blocks, and what can keep them besides kvio.

A peer's library is imported when it is opened; one that is not installed is left out by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import kvio
from kvio import BlockStatus, UnsupportedError
from kvio.experiments.blocks import Block
from kvio.experiments.requests import Request
from kvio.types import Durability

PLAIN: Final = "plain Python"

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
        """Give back what is held."""


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
    """What became of one request; *late_s* is how long it waited for a free thread."""

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
    """Serve one request; only the three calls are timed, not what is made ready between them.

    It arrives at *arrival_s* of ``time.perf_counter``, or is there (0), and loads into memory of
    its own, *mine*. Keys in *claimed* another request is offloading or has offloaded: as in an
    engine, nobody does so again, and every contender is given the same bytes.
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
    """Give the time in which at least one of the calls was under way."""
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
        open: on an empty directory, for a durability and so many I/O threads; None: this
            experiment cannot drive it.
    """

    name: str
    package: str | None = None
    checksum: bool = False
    guarantee: str
    open: Open | None = None

    def missing(self) -> str | None:
        """Say why it cannot take part here; None where it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"not installed: pip install {self.package}"
        if self.open is None:
            return f"{self.package} is installed, but nothing here drives it"
        return None


class _Kvio:
    """kvio as an engine's connector uses it: one call a request for each of the three steps.

    A block that is missing or corrupt loads no bytes.
    """

    def __init__(self, backend: str, root: Path, durability: Durability, threads: int) -> None:
        self._store = kvio.open_store(backend, root=root, durability=durability, io_threads=threads)
        self.count_leading = self._store.count_leading
        self.close = self._store.close

    def load(self, items: Items) -> int:
        results = self._store.read_blocks_into(items)
        for result in results:
            if result.status in (BlockStatus.FAILED, BlockStatus.TIMEOUT) and result.error:
                raise result.error
        return sum(result.nbytes for result in results if result.ok)

    def offload(self, items: Items) -> Counter[str]:
        modes: Counter[str] = Counter()
        for result in self._store.write_blocks(items):
            if result.error:
                raise result.error
            if result.receipt:
                modes[str(result.receipt.mode)] += 1
        return modes

    def modes(self) -> Counter[str]:
        return Counter(self._store.stats().modes)


class _Unreported:
    """Tells no I/O modes and holds nothing that must be given back."""

    def modes(self) -> Counter[str]:
        return Counter()

    def close(self) -> None:
        pass


class _Files(_Unreported):
    """A file a block; looking up is looking for the file."""

    def __init__(self, root: Path, durability: Durability, _threads: int) -> None:
        self._root = os.fspath(root)
        self._durable = durability == "durable"

    def count_leading(self, keys: Sequence[str]) -> int:
        return sum(1 for _ in takewhile(os.path.exists, map(self._path, keys)))

    def load(self, items: Items) -> int:
        return sum(self._read(self._path(key), pieces) for key, pieces in items)

    def offload(self, items: Items) -> Counter[str]:
        for key, pieces in items:
            path = self._path(key)
            # Two requests may miss the same block at once: each has a temporary of its own.
            temporary = f"{path}.{threading.get_ident()}.tmp"
            self._write(temporary, pieces)
            if self._durable:
                _sync(temporary)
            os.replace(temporary, path)
        if self._durable:
            _sync(self._root)
        return Counter(buffered=len(items))

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _write(self, path: str, pieces: Sequence[Any]) -> None:
        raise NotImplementedError

    def _read(self, path: str, pieces: Sequence[Any]) -> int:
        raise NotImplementedError


class _PlainPython(_Files):
    """open, a write a piece, os.replace; open, a readinto a piece."""

    def _write(self, path: str, pieces: Sequence[Any]) -> None:
        with open(path, "wb") as file:
            for piece in pieces:
                file.write(piece)

    def _read(self, path: str, pieces: Sequence[Any]) -> int:
        done = 0
        with open(path, "rb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while view.nbytes and (got := file.readinto(view)):
                    view = view[got:]
                    done += got
        return done


class _Safetensors(_Files):
    """A named tensor a piece; loading copies out of the mapped file."""

    def __init__(self, root: Path, durability: Durability, threads: int) -> None:
        super().__init__(root, durability, threads)
        self._open = importlib.import_module("safetensors").safe_open
        self._save = importlib.import_module("safetensors.numpy").save_file

    def _write(self, path: str, pieces: Sequence[Any]) -> None:
        self._save({f"{index:04d}": piece for index, piece in enumerate(pieces)}, path)

    def _read(self, path: str, pieces: Sequence[Any]) -> int:
        done = 0
        with self._open(path, framework="np") as file:
            for index, piece in enumerate(pieces):
                piece[:] = file.get_tensor(f"{index:04d}")
                done += piece.nbytes
        return done


class _Tensorstore(_Unreported):
    """The key-value store under tensorstore's arrays; every block of a request at once."""

    def __init__(self, root: Path, durability: Durability, threads: int) -> None:
        tensorstore = importlib.import_module("tensorstore")
        context = {
            "file_io_concurrency": {"limit": threads},
            "file_io_sync": durability == "durable",
        }
        spec = {"driver": "file", "path": f"{root}/", "context": context}
        self._store = tensorstore.KvStore.open(spec).result()

    def count_leading(self, keys: Sequence[str]) -> int:
        found = [self._store.read(key, byte_range=slice(0, 0)) for key in keys]
        return sum(1 for _ in takewhile(lambda read: read.result().state == "value", found))

    def load(self, items: Items) -> int:
        reads = [self._store.read(key) for key, _ in items]
        return sum(
            _scatter(read.result().value, pieces)
            for read, (_, pieces) in zip(reads, items, strict=True)
        )

    def offload(self, items: Items) -> Counter[str]:
        writes = [self._store.write(key, b"".join(pieces)) for key, pieces in items]
        for write in writes:
            write.result()
        return Counter()


class _Obstore(_Unreported):
    """The object store interface over a directory."""

    def __init__(self, root: Path, durability: Durability, _threads: int) -> None:
        if durability == "durable":
            raise UnsupportedError("obstore's LocalStore never synchronises")
        self._obstore = importlib.import_module("obstore")
        self._store = importlib.import_module("obstore.store").LocalStore(prefix=os.fspath(root))

    def count_leading(self, keys: Sequence[str]) -> int:
        return sum(1 for _ in takewhile(self._contains, keys))

    def load(self, items: Items) -> int:
        return sum(self._load(key, pieces) for key, pieces in items)

    def offload(self, items: Items) -> Counter[str]:
        for key, pieces in items:
            self._obstore.put(self._store, key, pieces)
        return Counter()

    def _load(self, key: str, pieces: Sequence[Any]) -> int:
        lengths = [piece.nbytes for piece in pieces]
        starts = [end - nbytes for end, nbytes in zip(accumulate(lengths), lengths, strict=True)]
        # Several times as fast as get(), which streams.
        ranges = self._obstore.get_ranges(self._store, key, starts=starts, lengths=lengths)
        return sum(_scatter(got, [piece]) for got, piece in zip(ranges, pieces, strict=True))

    def _contains(self, key: str) -> bool:
        try:
            self._obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        return True


def _scatter(value: Any, pieces: Sequence[Any]) -> int:
    """Copy bytes into the pieces in order; count those that there were."""
    view = memoryview(value).cast("B")
    done = 0
    for piece in pieces:
        part = view[done : done + piece.nbytes]
        memoryview(piece)[: part.nbytes] = part
        done += part.nbytes
    return done


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_SYNCED: Final = "fsync of every file, then of the directory once a request, when durable"

_UNNAMED: Final = (
    "linkat of an unnamed file, or rename where there is none; CRC32C stored, and verified by "
    "every load; fdatasync of every file and fsync of the directories when durable"
)

#: Every contender by name, plain Python first.
CONTENDERS: Final = {
    one.name: one
    for one in (
        Contender(
            name=PLAIN,
            guarantee=f"os.replace of a temporary; no checksum; {_SYNCED}",
            open=_PlainPython,
        ),
        *(
            Contender(name=name, checksum=True, guarantee=_UNNAMED, open=partial(_Kvio, name))
            for name in ("posix-tmpfile", "posix-direct", "hybrid")
        ),
        Contender(
            name="safetensors",
            package="safetensors",
            guarantee="os.replace of what save_file wrote; the header's lengths are checked, no "
            f"checksum; {_SYNCED}",
            open=_Safetensors,
        ),
        Contender(
            name="tensorstore",
            package="tensorstore",
            guarantee="file driver: rename of its lock file; no checksum; file_io_sync (fsync of "
            "file and directory) when durable, else off",
            open=_Tensorstore,
        ),
        Contender(
            name="obstore LocalStore",
            package="obstore",
            guarantee="rename of a staging file; no checksum; never an fsync",
            open=_Obstore,
        ),
        Contender(name="LMCache local disk", package="lmcache", guarantee="unknown"),
        Contender(name="NIXL POSIX", package="nixl", guarantee="unknown"),
    )
}
