"""Where a contender stores, the options that lead DLIO there, and what is found afterwards."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from benchmarks.harness import page_cache
from benchmarks.harness.run import fresh_directory
from benchmarks.harness.s3_libraries import LIBRARIES, missing
from benchmarks.harness.s3_server import Server
from benchmarks.scenarios.dlio.process import overrides, quoted
from kvio import MiB

_STOCK: Final = "local_fs"
_POSIX: Final = ("posix-tmpfile", "posix-direct", "hybrid")
_S3: Final = tuple(f"s3+{library}" for library in LIBRARIES)
_TORCH: Final = " torch"
#: DLIO's own storage and readers in kvio's loader; tables divide by its times.
REFERENCE: Final = _STOCK
#: Stock DLIO: its own storage, readers and loader.
STOCK: Final = f"{_STOCK}{_TORCH}"
#: The contender that claims are about.
TMPFILE: Final = _POSIX[0]
#: Every contender, in the order of tables.
CONTENDERS: Final = (
    *(f"{storage}{loader}" for storage in (_STOCK, *_POSIX) for loader in ("", _TORCH)),
    *_S3,
)
#: Where samples and checkpoints are, below a directory or a prefix.
DATA: Final = "data"
CHECKPOINTS: Final = "checkpoints"

_LOADER: Final = "kvio.connectors.dlio.loader.KvioLoader"
_PLAIN: Final = "benchmarks.scenarios.dlio.plain.PlainCheckpointing"
_CHUNK: Final = MiB


def default() -> list[str]:
    """Return the default contenders: with one S3 library, the first that is installed."""
    chosen = next((name for name in _S3 if missing(library_of(name)) is None), _S3[0])
    return [name for name in CONTENDERS if name not in _S3 or name == chosen]


def library_of(contender: str) -> str:
    """Return the name of an S3 contender's library."""
    return contender.partition("+")[2]


def backend_of(contender: str) -> str | None:
    """Return the name of kvio's backend; None: DLIO's own storage."""
    storage = contender.removesuffix(_TORCH)
    return None if storage == _STOCK else storage


def has_own_loader(contender: str) -> bool:
    """Report whether DLIO's own loader reads, in worker processes of torch."""
    return contender.endswith(_TORCH)


def uses_server(contender: str) -> bool:
    """Report whether blocks are objects on a server."""
    return contender in _S3


def has_torch() -> bool:
    """Report whether torch is installed; without it DLIO has neither loader nor checkpoints."""
    return importlib.util.find_spec("torch") is not None


class Directory:
    """A directory, and the contender that stores in it."""

    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(self, root: Path, contender: str) -> None:
        self._root = root
        self._contender = contender

    def dlio_options(self) -> list[str]:
        """Return the options that lead DLIO there, through the contender's storage and loader."""
        backend, own_loader = backend_of(self._contender), has_own_loader(self._contender)
        if backend is None:
            return _of_stock(str(self._root), own_loader=own_loader)
        return _of_kvio(backend, str(self._root), {}, own_loader=own_loader)

    def heat(self) -> float | None:
        """Make the reads that follow hot; return the cached fraction, None: not known."""
        page_cache.drop(self._root)
        page_cache.warm(self._root)
        return page_cache.cached_fraction(self._root)

    def difference(self, expected: Path) -> str | None:
        """Name what is not as in a directory of files; None: every name and byte is the same."""
        names = _names_in(self._root)
        if others := names ^ _names_in(expected):
            return _odd(others, names)
        different = (n for n in sorted(names) if not _same(self._root / n, expected / n))
        return next((f"{name}: other bytes" for name in different), None)


class Prefix:
    """A prefix in a bucket, looked at and emptied by the raw client, without any code of kvio.

    Attributes:
        environment: what is added to DLIO's.
    """

    def __init__(self, server: Server, prefix: str, contender: str) -> None:
        self.environment: Mapping[str, str] = {
            name: value for name, value in server.environ.items() if name.startswith("AWS_")
        }
        self._server = server
        self._prefix = f"{prefix}/"
        self._contender = contender

    def dlio_options(self) -> list[str]:
        """Return the options that lead DLIO there, through the contender's backend."""
        backend = backend_of(self._contender)
        assert backend is not None
        root = f"{self._server.bucket}/{self._prefix.rstrip('/')}"
        return _of_kvio(backend, root, {"endpoint_url": self._server.url}, own_loader=False)

    def heat(self) -> float | None:
        """Do nothing: objects are in the server's memory."""
        return None

    def difference(self, expected: Path) -> str | None:
        """Name what is not as in a directory of files; None: every name and byte is the same."""
        wanted = _names_in(expected)
        with closing(self._server.inspector()) as inspector:
            sizes = inspector.sizes(self._prefix)
        found = {name.removeprefix(self._prefix): nbytes for name, nbytes in sizes.items()}
        if others := set(found) ^ wanted:
            return _odd(others, set(found))
        with closing(self._server.client(max([_CHUNK, *found.values()]))) as client:
            for name in sorted(wanted):
                answer = client.call("GET", f"/{self._server.bucket}/{self._prefix}{name}")
                if answer.status != 200 or answer.body != (expected / name).read_bytes():
                    return f"{name}: other bytes"
        return None

    def clear(self) -> None:
        """Remove every object of this place."""
        with closing(self._server.inspector()) as inspector:
            inspector.delete(list(inspector.sizes(self._prefix)))


#: A fresh directory, or a prefix that no other trial uses.
Place: TypeAlias = Directory | Prefix


@contextmanager
def place_of(contender: str, base: Path, server: Server | None) -> Iterator[Place]:
    """Lend a contender a fresh place, and remove what it stored."""
    if not uses_server(contender):
        with fresh_directory(base) as root:
            yield Directory(root, contender)
        return
    assert server is not None
    place = Prefix(server, base.name.lstrip("."), contender)
    try:
        yield place
    finally:
        place.clear()


def _of_stock(root: str, *, own_loader: bool) -> list[str]:
    """Return the options of DLIO's own storage in a directory."""
    settings = {
        "dataset.data_folder": quoted(f"{root}/{DATA}"),
        "checkpoint.checkpoint_folder": quoted(f"{root}/{CHECKPOINTS}"),
    }
    if not own_loader:
        settings["reader.data_loader_classname"] = _LOADER
        settings["reader.data_loader_sampler"] = "iterative"
    if not has_torch():
        settings["checkpoint.checkpoint_mechanism_classname"] = _PLAIN
    return overrides(settings)


def _of_kvio(backend: str, root: str, store: Mapping[str, str], *, own_loader: bool) -> list[str]:
    """Return the options of kvio's storage: in a directory, or in a bucket below a prefix."""
    settings = {"dataset.data_folder": DATA, "checkpoint.checkpoint_folder": CHECKPOINTS}
    if own_loader:
        settings["reader.data_loader_classname"] = "null"
    return [
        f"+kvio={backend}",
        f"kvio.root={quoted(root)}",
        *(f"+kvio.options.{name}={quoted(value)}" for name, value in store.items()),
        *overrides(settings),
    ]


def _names_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def _odd(others: set[str], found: set[str]) -> str:
    name = min(others)
    return f"{name}: {'stored, and not expected' if name in found else 'missing'}"


def _same(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while chunk := left.read(_CHUNK):
            if chunk != right.read(_CHUNK):
                return False
    return True
