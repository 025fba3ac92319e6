"""The contenders: kvio, plain Python, libraries for files, and what engines keep blocks with.

A peer's library is imported when it is opened; one that is not installed is left out by name.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, Final

import kvio
from benchmarks.scenarios.kv_offload.engines import ENGINES
from benchmarks.scenarios.kv_offload.serving import Contender, Items, Unreported, scatter, sync
from kvio import BlockStatus, UnsupportedError
from kvio.types import Durability

PLAIN: Final = "plain Python"


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


class _Files(Unreported):
    """A file per block; a lookup checks that there is a file."""

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
                sync(temporary)
            os.replace(temporary, path)
        if self._durable:
            sync(self._root)
        return Counter(buffered=len(items))

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _write(self, path: str, pieces: Sequence[Any]) -> None:
        raise NotImplementedError

    def _read(self, path: str, pieces: Sequence[Any]) -> int:
        raise NotImplementedError


class _PlainPython(_Files):
    """open, a write per piece, os.replace; open, a readinto per piece."""

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
    """A named tensor per piece; loading copies out of the mapped file."""

    def __init__(self, root: Path, durability: Durability, threads: int) -> None:
        import safetensors.numpy

        super().__init__(root, durability, threads)
        self._open = safetensors.safe_open
        self._save = safetensors.numpy.save_file

    def _write(self, path: str, pieces: Sequence[Any]) -> None:
        self._save({f"{index:04d}": piece for index, piece in enumerate(pieces)}, path)

    def _read(self, path: str, pieces: Sequence[Any]) -> int:
        done = 0
        with self._open(path, framework="np") as file:
            for index, piece in enumerate(pieces):
                piece[:] = file.get_tensor(f"{index:04d}")
                done += piece.nbytes
        return done


class _Tensorstore(Unreported):
    """The key-value store under tensorstore's arrays; every block of a request at once."""

    def __init__(self, root: Path, durability: Durability, threads: int) -> None:
        import tensorstore

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
            scatter(read.result().value, pieces)
            for read, (_, pieces) in zip(reads, items, strict=True)
        )

    def offload(self, items: Items) -> Counter[str]:
        writes = [self._store.write(key, b"".join(pieces)) for key, pieces in items]
        for write in writes:
            write.result()
        return Counter()


class _Obstore(Unreported):
    """The object store interface over a directory."""

    def __init__(self, root: Path, durability: Durability, _threads: int) -> None:
        import obstore.store

        if durability == "durable":
            raise UnsupportedError("obstore's LocalStore never synchronises")
        self._obstore = obstore
        self._store = obstore.store.LocalStore(prefix=os.fspath(root))

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
        return sum(scatter(got, [piece]) for got, piece in zip(ranges, pieces, strict=True))

    def _contains(self, key: str) -> bool:
        try:
            self._obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        return True


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
        *ENGINES,
    )
}
