"""Tune one mount, and save and load its calibration file."""

from __future__ import annotations

import datetime as dt
import errno
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvio.backends.posix.root import (
    CALIBRATION_NAME,
    TEMP_MARK,
    is_leftover,
    read_calibration,
    temp_prefix,
)
from kvio.errors import ConfigError, UnsupportedError, storage_error
from kvio.medium import Medium, examine
from kvio.policies import Calibration, dump_calibration, load_calibration
from kvio.tuning.choosing import DIRECTIONS, calibrate, crossings
from kvio.tuning.measuring import (
    MAX_TRIAL_BYTES,
    MIN_ROUNDS,
    SIZES,
    Bench,
    Budget,
    Cell,
    Report,
    Schedule,
)
from kvio.types import Durability, IOMode, KiB
from kvio.url import parse_size

_SUFFIX: Final = "tune"
_ABANDONED_S: Final = 86400.0
#: Share of the budget for the first pass; the rest measures sizes where the best mode changes.
_FIRST_SHARE: Final = 0.7


@dataclass(frozen=True, slots=True)
class Tuning:
    """A calibration and its measurements; *measured* is plain JSON."""

    calibration: Calibration
    measured: dict[str, Any]

    @property
    def decides(self) -> bool:
        """Return whether any size had enough rounds; else the calibration is the default."""
        return any(cell["rounds"] >= MIN_ROUNDS for cell in self.measured["cells"])

    def dump(self) -> str:
        """Return both as the text of a calibration file."""
        return dump_calibration(self.calibration, self.measured)


def tune(
    path: str,
    *,
    budget_s: float = 30.0,
    max_bytes: int | str = "16GiB",
    io_threads: int | None = None,
    writes: Durability = "visible",
    sizes: Sequence[int] = SIZES,
    report: Report | None = None,
) -> Tuning:
    """Measure the mount of a directory and choose I/O modes; leave no files behind.

    Args:
        path: a directory on the mount; a private directory is created in it and removed.
        budget_s: no round starts that would end after this many seconds.
        max_bytes: maximum of bytes written in all.
        io_threads: the concurrency to measure besides 1; default: as `open_store` chooses.
        writes: measure writes until they are ``visible`` or ``durable``.
        sizes: block sizes in bytes, ascending; more are added where the best mode changes.
        report: callback before every round.

    Raises:
        ConfigError: *path* is no directory, or a number is invalid.
        UnsupportedError: there is only one I/O mode, or durable writes are not supported.
        StorageError: the file system failed.
    """
    threads = _default_threads() if io_threads is None else io_threads
    if not budget_s > 0 or threads < 1:
        raise ConfigError("the budget must be above 0 seconds, and io_threads at least 1")
    limit = parse_size(max_bytes)
    with scratch_directory(path) as directory, ExitStack() as stack:
        medium = _examine(directory)
        modes = _modes(medium)
        trial_bytes = _trial_bytes(directory, sizes, limit // len(modes))
        bench = Bench(
            directory,
            modes,
            threads=threads,
            durability=writes,
            trial_bytes=trial_bytes,
            stack=stack,
        )
        budget = Budget(budget_s, limit, report)
        rows = _measure(Schedule(bench, budget, trial_bytes=trial_bytes), sizes, threads)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    calibration = calibrate(rows, f"tuned {today}", cold=bench.cold)
    setting = {
        "kvio": importlib.metadata.version("kvio"),
        "when": today,
        "system": f"{platform.system()} {platform.release()}",
        "file_system": medium.name,
        "writes": writes,
        "io_threads": threads,
        "cold_reads": bench.cold,
        "seconds": round(budget.spent_s, 1),
        "bytes_written": budget.written,
    }
    cells = [_describe(cell) for row in rows.values() for cell in row]
    return Tuning(calibration, setting | {"cells": cells})


def save(path: str, tuning: Tuning) -> str:
    """Write the calibration file of *path* atomically and return its path.

    Only this user can write it. Users who can list the directory can read it if this user may
    set its group.

    Raises:
        StorageError: the file could not be written.
    """
    target = os.path.join(path, CALIBRATION_NAME)
    temporary = os.path.join(path, f"{temp_prefix()}{secrets.token_hex(16)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                directory = os.stat(path)
                with suppress(PermissionError):  # this user is not a member of the group
                    os.fchown(fd, -1, directory.st_gid)
                os.fchmod(fd, 0o600 | stat.S_IMODE(directory.st_mode) & 0o044)
                file.write(tuning.dump() + "\n")
                file.flush()
                os.fsync(fd)
            os.rename(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"write {target!r}") from exc
    return target


def load(path: str) -> Tuning:
    """Read the existing calibration of *path*.

    Raises:
        ConfigError: there is none, or it is invalid.
        StorageError: the file could not be read.
    """
    source = os.path.join(path, CALIBRATION_NAME)
    try:
        text = read_calibration(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no calibration in {path!r}; create one with kvio tune") from None
    except ValueError:
        raise ConfigError(f"{source} is not a calibration file; tune again") from None
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"read {source!r}") from exc
    calibration = load_calibration(text, source)
    measured = json.loads(text).get("measured")
    return Tuning(calibration, measured if isinstance(measured, dict) else {})


@contextmanager
def scratch_directory(path: str) -> Iterator[str]:
    """Create a private directory in *path*, yield it, and remove it.

    Leftovers of killed runs are removed too.

    Raises:
        ConfigError: *path* is no directory.
        StorageError: the directory could not be created.
    """
    if not os.path.isdir(path):
        raise ConfigError(f"{path!r} is not a directory")
    directory = os.path.join(path, f"{temp_prefix()}{secrets.token_hex(8)}{_SUFFIX}")
    try:
        _remove_leftovers(path)
        os.mkdir(directory, 0o700)
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"create a directory in {path!r}") from exc
    try:
        os.chmod(directory, 0o700)
        yield directory
    finally:
        with _interrupts_ignored():
            shutil.rmtree(directory, ignore_errors=True)


def _remove_leftovers(path: str) -> None:
    for found in Path(path).glob(f"{TEMP_MARK}*{_SUFFIX}"):
        if is_leftover(found, older_than_s=_ABANDONED_S):
            shutil.rmtree(found, ignore_errors=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore a second Ctrl-C during the cleanup after the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _measure(schedule: Schedule, sizes: Sequence[int], threads: int) -> dict[int, list[Cell]]:
    levels = sorted({1, threads})
    for nbytes in sizes:
        for concurrency in levels:
            schedule.add(nbytes, concurrency)
    schedule.spend(share=_FIRST_SHARE)
    for concurrency in levels:
        row = schedule.row(concurrency)
        for direction in DIRECTIONS:
            for nbytes in crossings(row, direction):
                schedule.add(nbytes, concurrency)
    schedule.spend(share=1.0)
    # An unmeasured size between two others must not insert the default mode between them.
    schedule.cells = [c for c in schedule.cells if c.measured or c.nbytes in sizes]
    return {concurrency: schedule.row(concurrency) for concurrency in levels}


def _describe(cell: Cell) -> dict[str, Any]:
    """Return a cell as JSON, with rates in 10^6 bytes per second and seconds per block."""

    def rates(samples: dict[IOMode, list[float]]) -> dict[str, float]:
        return {str(m): round(cell.nbytes / median(s) / 1e6, 1) for m, s in samples.items()}

    return {
        "nbytes": cell.nbytes,
        "concurrency": cell.concurrency,
        "nblocks": cell.nblocks,
        "rounds": cell.rounds,
        "write_mb_per_s": rates(cell.write_s),
        "read_mb_per_s": rates(cell.read_s),
        "settle_s": {str(m): round(median(s), 7) for m, s in cell.settle_s.items()},
        "dirty_bytes": {str(m): int(median(s)) for m, s in cell.dirty.items() if s},
    }


def _examine(directory: str) -> Medium:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return examine(fd, temp_prefix() + secrets.token_hex(16))
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"probe {directory!r}") from exc
    finally:
        os.close(fd)


def _modes(medium: Medium) -> list[IOMode]:
    if not medium.direct_io:
        raise UnsupportedError(
            f"nothing to tune: {medium.notes[0]}, so the hybrid backend always uses buffered I/O"
        )
    return [IOMode.BUFFERED, IOMode.DIRECT] + [IOMode.DONTCACHE] * medium.dontcache


def _trial_bytes(directory: str, sizes: Sequence[int], limit: int) -> int:
    """Return the maximum of bytes per trial: at most a quarter of the free space.

    Raises:
        ConfigError: the smallest size does not fit.
    """
    free = os.statvfs(directory)
    room = min(MAX_TRIAL_BYTES, free.f_bavail * free.f_frsize // 4, limit)
    if not sizes or min(sizes) < 1 or room < min(sizes):
        raise ConfigError(
            f"no room to measure: only {room // KiB} KiB may be written per trial; "
            "free disk space or raise max_bytes"
        )
    return room


def _default_threads() -> int:
    """Return the same default as `open_store`."""
    return min(32, max(4, 2 * len(os.sched_getaffinity(0))))
