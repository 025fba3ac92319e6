"""Daemons for tests: in this process over a backend that obeys, or processes of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import kvio
from kvio.staging import StagingTier
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.options import TierOptions
from kvio.testing.fakes import WrappedStore
from kvio.url import parse_size
from tests.staging.controlled import LONG_S, ControlledBackend, close_without

#: What of `kvio.stage` is the client's where a daemon has the rest.
_CLIENTS = ("when_full", "timeout", "close_store", "spool")


@contextmanager
def socket_path() -> Iterator[str]:
    """Yield a path short enough for a socket, in a directory of our own."""
    directory = tempfile.mkdtemp(prefix="kvd-")
    try:
        yield f"{directory}/s"
    finally:
        shutil.rmtree(directory)


@contextmanager
def serving(
    store: kvio.Store, capacity: int | str = "1MiB", *, path: str | None = None, **options: Any
) -> Iterator[StageDaemon]:
    """Run a daemon in this process; at the end it stores everything."""
    options.setdefault("drain_threads", 2)
    populate = options.pop("populate", False)
    with socket_path() if path is None else nullcontext(path) as where:
        daemon = StageDaemon(
            store,
            where,
            capacity_bytes=parse_size(capacity),
            options=TierOptions(**options),
            populate=populate,
        )
        try:
            yield daemon
        finally:
            daemon.close(timeout=LONG_S)


@contextmanager
def staged(
    store: WrappedStore[ControlledBackend], capacity: int | str = "1MiB", **options: Any
) -> Iterator[kvio.StagingTier]:
    """Put a client's tier before a store, as `tests.staging.controlled.staged` does its own."""
    ours = {name: options.pop(name) for name in _CLIENTS if name in options}
    if "timeout" in ours:
        options["timeout"] = ours["timeout"]
    with serving(store, capacity, **options) as daemon:
        tier = kvio.stage(store, daemon=daemon.path, **ours)
        try:
            yield tier
        finally:
            close_without(store, tier)
            daemon.close(timeout=LONG_S)
            store.close(timeout=LONG_S)


def client_of(store: kvio.Store, daemon: StageDaemon, **options: str) -> StagingTier:
    """Return a client's tier."""
    tier = kvio.stage(store, daemon=daemon.path, **options)  # type: ignore[arg-type]
    assert isinstance(tier, StagingTier)
    return tier


def until(happened: Callable[[], bool]) -> None:
    """Ask again and again: what is waited for needs no more than other threads' turns."""
    ends = threading.Event()
    guard = threading.Timer(LONG_S, ends.set)
    guard.start()
    while not happened():
        assert not ends.is_set(), "it never happened"
    guard.cancel()


class Process:
    """A daemon in a process of its own."""

    def __init__(self, url: str, path: str, *options: str) -> None:
        self.path = path
        command = [sys.executable, "-m", "tests.staging.daemon.main", url, "--socket", path]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()

    def kill(self) -> None:
        """End it as a power cut would, but for what the kernel keeps."""
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        """Ask it to end; its status and what it said."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, said

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def open_files() -> int:
    """Count our open descriptors."""
    return len(os.listdir("/proc/self/fd"))
