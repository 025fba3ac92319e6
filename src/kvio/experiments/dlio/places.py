"""Where a turn stores, and what is found there afterwards without any of kvio's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from kvio import MiB
from kvio.experiments import page_cache
from kvio.experiments.dlio import options
from kvio.experiments.dlio.order import backend_of, has_own_loader, uses_server
from kvio.experiments.run import fresh_directory
from kvio.experiments.s3 import raw
from kvio.experiments.s3.server import Server

_CHUNK: Final = MiB
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Place(Protocol):
    """A fresh directory, or a prefix that nobody else has."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Give what DLIO's environment needs beside."""

    def dlio_options(self) -> list[str]:
        """Tell DLIO where it is, and through what."""

    def heat(self) -> float | None:
        """Make reads that follow hot; give the cached fraction, None where that is not known."""

    def difference(self, expected: Path) -> str | None:
        """Say what is not as in a directory of files; None: every name and byte is the same."""


@contextmanager
def place_of(contender: str, base: Path, server: Server | None) -> Iterator[Place]:
    """Lend a contender a fresh place, and remove what it stored."""
    if not uses_server(contender):
        with fresh_directory(base) as root:
            yield directory(root, contender)
        return
    assert server is not None
    place = _BucketPlace(server, base.name.lstrip("."), contender)
    try:
        yield place
    finally:
        place.clear()


def directory(root: Path, contender: str) -> Place:
    """Give an empty directory as a contender's place."""
    return _FilePlace(root, contender)


class _FilePlace:
    environment = _NOTHING

    def __init__(self, root: Path, contender: str) -> None:
        self.root = root
        self._contender = contender

    def dlio_options(self) -> list[str]:
        backend, own_loader = backend_of(self._contender), has_own_loader(self._contender)
        if backend is None:
            return options.of_stock(str(self.root), own_loader=own_loader)
        return options.of_kvio(backend, str(self.root), {}, own_loader=own_loader)

    def heat(self) -> float | None:
        page_cache.drop(self.root)
        page_cache.warm(self.root)
        return page_cache.cached_fraction(self.root)

    def difference(self, expected: Path) -> str | None:
        names = _names_in(self.root)
        if others := names ^ _names_in(expected):
            return _odd(others, names)
        different = (name for name in sorted(names) if not _same(self.root / name, expected / name))
        return next((f"{name}: other bytes" for name in different), None)


class _BucketPlace:
    """Looked at by the raw client."""

    def __init__(self, server: Server, prefix: str, contender: str) -> None:
        self.environment: Mapping[str, str] = {
            name: value for name, value in server.environ.items() if name.startswith("AWS_")
        }
        self._server = server
        self._prefix = f"{prefix}/"
        self._contender = contender

    def dlio_options(self) -> list[str]:
        backend = backend_of(self._contender)
        assert backend is not None
        root = f"{self._server.bucket}/{self._prefix.rstrip('/')}"
        store = {"endpoint_url": self._server.url}
        return options.of_kvio(backend, root, store, own_loader=False)

    def heat(self) -> float | None:
        return None  # the server's memory

    def difference(self, expected: Path) -> str | None:
        wanted = {name: (expected / name).stat().st_size for name in _names_in(expected)}
        found = {name.removeprefix(self._prefix): size for name, size in self._sizes().items()}
        if others := set(found) ^ set(wanted):
            return _odd(others, set(found))
        server, module = self._server, raw.load(raw.find())
        endpoint = raw.endpoint(module, server.url, server.region, server.environ)
        with closing(module.Client(endpoint, most_bytes=max(_CHUNK, *found.values()))) as client:
            for name in sorted(wanted):
                answer = client.call("GET", f"/{server.bucket}/{self._prefix}{name}")
                if answer.status != 200 or answer.body != (expected / name).read_bytes():
                    return f"{name}: other bytes"
        return None

    def clear(self) -> None:
        """Remove every object of this place."""
        with closing(self._server.inspector()) as inspector:
            inspector.delete(list(inspector.sizes(self._prefix)))

    def _sizes(self) -> dict[str, int]:
        with closing(self._server.inspector()) as inspector:
            return inspector.sizes(self._prefix)


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
