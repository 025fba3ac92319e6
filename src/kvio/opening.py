"""Open a store: from a URL and keywords to a backend and its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvio.calls import Settings
from kvio.errors import ConfigError, OutOfMemoryError
from kvio.store import Store
from kvio.types import Durability, GiB, Layout, Verify
from kvio.url import OptionValue, StoreURL, absolute, hide, locate, parse_size

if TYPE_CHECKING:
    from kvio.placement import Placement


def open_store(
    url: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    io_threads: int | None = None,
    durability: Durability | None = None,
    layout: Layout | None = None,
    verify: Verify | None = None,
    max_queued_bytes: int | str = GiB,
    timeout: float | None = None,
    placement: Placement | None = None,
    create: bool = False,
    options: Mapping[str, OptionValue] | None = None,
) -> Store:
    """Open a store by path, by URL (``hybrid:///mnt/kv?durability=durable``), or by name and root.

    Args:
        url: the path of a directory, which the backend ``hybrid`` opens: an `os.PathLike`, or text
            with a slash, taken as it is written (``%`` and ``?`` mean nothing in it); or
            ``backend://path?option=value``, or a backend's name alone.
        root: the directory of a file-system store, where the URL has no path.
        io_threads: threads for batches, submitted work and calls with a timeout; default: twice
            the processors, 4 to 32.
        durability: the level every write reaches, ``visible`` (default) or ``durable``.
        layout: ``block`` (default: trailer, checksum) or ``plain`` (path = key, bytes exact).
        verify: what reads check: ``full`` (default), ``length`` or ``off``.
        max_queued_bytes: submitting waits while queued and running work holds more bytes; a
            number, or text such as ``"1GiB"``.
        timeout: seconds for calls without a timeout of their own; None: no limit.
        placement: a `kvio.placement.Placement`: processors for the I/O threads, near the device
            or a GPU; None: the system decides. Calls on the caller's thread stay there.
        create: make the directory of a file-system store, and those above it, if it is missing.
        options: more options of the backend, as in the URL.

    Raises:
        UnknownBackendError, MissingDependencyError: there is no such backend, or an extra must be
            installed for it.
        ConfigError: an option or the root is wrong.
        TypeError: a path is not text.
        UnsupportedError: the storage lacks the durability or the I/O mode that was asked for.
    """
    parsed = locate(url)
    given: dict[str, OptionValue] = {
        "durability": durability,
        "layout": layout,
        "verify": verify,
        "root": None if root is None else absolute(root),
        "create": "true" if create else None,
    }
    merged: dict[str, OptionValue] = dict(parsed.options)
    for extra in (options or {}, {k: v for k, v in given.items() if v is not None}):
        for name, value in extra.items():
            if name in parsed.options and parsed.options[name] != value:
                raise ConfigError(f"option {name!r} is given twice: in the URL and beside it")
            merged[name] = hide(name, value)
    full = StoreURL(parsed.scheme, parsed.host, parsed.path, merged)
    settings = Settings(
        io_threads=_default_threads() if io_threads is None else io_threads,
        max_queued_bytes=parse_size(max_queued_bytes),
        timeout=timeout,
        placement=placement,
    )
    try:
        return Store(full, settings)
    except OutOfMemoryError:
        raise
    except MemoryError as exc:
        raise OutOfMemoryError(f"no memory to open {url!r}") from exc


def _default_threads() -> int:
    return min(32, max(4, 2 * len(os.sched_getaffinity(0))))
