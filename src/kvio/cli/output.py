"""Share helpers between commands: error lines, opening stores, progress bars, formats."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, ParamSpec, Self, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TransferSpeedColumn,
)

import kvio

BAD_BLOCK: Final = 1
FAILED: Final = 2
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141  # the status that a shell reports for SIGPIPE

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

StoreArgument: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="STORE", help="A directory, or a URL such as hybrid:///mnt/kv."),
]

CreateOption: TypeAlias = Annotated[
    bool,
    typer.Option("--create", help="Create the directory of STORE and its parents if missing."),
]

_WINDOW: Final = 1024
#: Shorter transfers end before a progress bar could be read.
_LONG_BYTES: Final = 64 * kvio.MiB
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|)").fullmatch
_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def complain(message: str, status: int = FAILED) -> int:
    """Print an error in one line on stderr and return the exit status."""
    sys.stderr.write(f"kvio: {' '.join(message.split())}\n")
    return status


def complain_of(exc: BaseException) -> int:
    """Print an exception in one line on stderr and return its exit status."""
    if isinstance(exc, kvio.BlockNotFoundError | kvio.CorruptBlockError):
        return complain(str(exc), BAD_BLOCK)
    if isinstance(exc, kvio.KvioError):
        return complain(str(exc))
    if isinstance(exc, OSError) and exc.strerror:
        where = f"{exc.filename}: " if exc.filename is not None else ""
        return complain(f"{where}{exc.strerror}")
    return complain(str(exc) or "out of memory")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: user errors become one line and an exit status, never a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            raise typer.Exit(forget_stdout()) from None
        except (kvio.KvioError, OSError, MemoryError) as exc:
            raise typer.Exit(complain_of(exc)) from None

    return run


def forget_stdout() -> int:
    """Discard all further output and return the exit status for a closed pipe."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return PIPE_CLOSED


def open_store(store: str, *, io_threads: int | None = None, create: bool = False) -> kvio.Store:
    """Open the store of a STORE argument: a URL, or a directory with the hybrid backend."""
    where = store if "://" in store else Path(store)
    return kvio.open_store(where, io_threads=io_threads, create=create)


def print_line(text: str = "") -> None:
    """Print a line to stdout; undecodable bytes of names are printed unchanged."""
    write_stdout(memoryview(os.fsencode(f"{text}\n")))


def write_stdout(data: memoryview) -> None:
    """Write all bytes to stdout; with PYTHONUNBUFFERED a single write may be short."""
    while data:
        data = data[sys.stdout.buffer.write(data) :]


class Meter:
    """Counts blocks and bytes and shows them on stderr if it is a terminal."""

    def __init__(self, what: str, blocks: int) -> None:
        self.blocks = 0
        self.nbytes = 0
        self._started = time.monotonic()
        self._progress = progress_bar(
            MofNCompleteColumn(), TextColumn("blocks"), TextColumn("{task.fields[rate]}")
        )
        self._task = self._progress.add_task(what, total=blocks, rate="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @property
    def rate(self) -> str:
        """Return the bytes so far and the rate in 10^6 bytes per second."""
        speed = self.nbytes / 1e6 / max(1e-9, time.monotonic() - self._started)
        return f"{format_bytes(self.nbytes)}, {speed:.0f} MB/s"

    def add(self, nbytes: int) -> None:
        """Count one block."""
        self.blocks += 1
        self.nbytes += nbytes
        self._progress.update(self._task, advance=1, rate=self.rate)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the bar while something else is printed."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


@contextmanager
def bytes_bar(what: str, nbytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for a long transfer; yield the function that advances it.

    Args:
        what: the label.
        nbytes: the expected bytes, or None if unknown.
    """
    if nbytes is not None and nbytes < _LONG_BYTES:
        yield lambda _: None
        return
    bar = progress_bar(DownloadColumn(binary_units=True), TransferSpeedColumn())
    task = bar.add_task(what, total=nbytes)
    with bar:
        yield lambda count: bar.advance(task, count)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar on stderr, shown only on a terminal and erased at the end."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not sys.stderr.isatty(),
    )


def receipt_line(receipt: kvio.Receipt) -> str:
    """Return a receipt as one line."""
    what = "kept" if receipt.existed else "stored"
    return (
        f"{what} {receipt.key}: {receipt.nbytes} bytes, {receipt.level}, {receipt.mode} "
        f"({receipt.reason}), crc32c {format_checksum(receipt.checksum)}"
    )


def in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Map a function over items in threads; yield results in order, with bounded lookahead."""
    source = iter(items)
    pool = ThreadPoolExecutor(threads)
    try:
        while window := list(islice(source, _WINDOW)):
            yield from pool.map(function, window)
    finally:
        pool.shutdown(cancel_futures=True)


def default_threads() -> int:
    """Return the default number of concurrent blocks."""
    return min(16, max(4, 2 * len(os.sched_getaffinity(0))))


def parse_duration(text: str) -> float:
    """Return the seconds in ``90``, ``30s``, ``15m``, ``24h`` or ``7d``."""
    match = _DURATION(text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration (for example 30s, 15m, 24h, 7d)")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(nbytes: float) -> str:
    """Return a size with a suitable unit."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    digits = 0 if unit == "bytes" or nbytes >= 100 else 1
    return f"{nbytes:.{digits}f}".removesuffix(".0") + f" {unit}"


def format_checksum(checksum: int | None) -> str:
    """Return a CRC32C in hexadecimal, or a dash."""
    return "-" if checksum is None else f"{checksum:08x}"
