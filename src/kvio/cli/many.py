"""Copy directories and files to and from a store."""

from __future__ import annotations

import errno
import os
import secrets
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import FileIO
from itertools import chain
from typing import Final, Literal, TypeAlias

import typer

import kvio
from kvio.cli.escapes import escape, unescape
from kvio.cli.output import (
    Meter,
    bytes_bar,
    complain,
    complain_of,
    default_threads,
    in_threads,
    open_store,
    print_line,
)

#: A key, a path and a size in bytes.
_File: TypeAlias = tuple[str, str, int]
IfExists: TypeAlias = Literal["keep", "replace", "error"]

_BATCH_BYTES: Final = 64 * kvio.MiB
_BATCH_FILES: Final = 1024


def put_file(
    store: kvio.Store, key: str, file: FileIO, if_exists: IfExists, *, shown: bool = False
) -> kvio.Receipt:
    """Store the rest of a file, of any kind and length, with bounded memory.

    With *shown*, show a progress bar if the file is long.
    """
    write = store._write_stream  # noqa: SLF001  # its only caller
    nbytes = _rest_of(file)
    with bytes_bar("storing", nbytes if shown else 0) as add:

        def read(room: memoryview) -> int:
            count = _read(file, room)
            add(count)
            return count

        return write(key, read, nbytes=nbytes, if_exists=if_exists)


def _rest_of(file: FileIO) -> int | None:
    """Return how many bytes a file still has, or None if that is unknown."""
    info = os.fstat(file.fileno())
    if not stat.S_ISREG(info.st_mode) or not info.st_size:  # files in /proc report 0
        return None
    return max(0, info.st_size - file.tell())


def _read(file: FileIO, room: memoryview) -> int:
    """Read available bytes; wait for them if the descriptor is non-blocking."""
    while True:
        try:
            count = file.readinto(room)
        except OSError as exc:
            exc.filename = file.name if isinstance(file.name, str) else "standard input"
            raise
        if count is not None:
            return count
        select.select([file], [], [])


def read_pieces(
    store: kvio.Store,
    key: str,
    offset: int = 0,
    nbytes: int | None = None,
    *,
    checked_first: bool = False,
) -> Iterator[memoryview]:
    """Yield a block, or a part of it, with bounded memory; see `kvio.streams.read`."""
    read = store._read_stream  # noqa: SLF001  # its only caller
    return read(key, offset, nbytes, checked_first=checked_first)


def shown(
    store: kvio.Store, key: str, offset: int, nbytes: int | None, pieces: Iterable[memoryview]
) -> Iterator[memoryview]:
    """Yield the pieces of a block; show a progress bar if the block is long."""
    if not sys.stderr.isatty():  # save the request for the length
        yield from pieces
        return
    rest = max(0, store.stat_block(key).nbytes - offset)
    with bytes_bar("reading", rest if nbytes is None else min(nbytes, rest)) as add:
        for piece in pieces:
            yield piece
            add(len(piece))


def write_file(path: str, pieces: Iterable[memoryview]) -> int:
    """Write a regular file atomically, or a special file directly, and return the length."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            return sum(map(file.write, pieces))
    target = os.path.realpath(path)
    temporary = f"{target}.{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb") as file:
            nbytes = sum(map(file.write, pieces))
        os.replace(temporary, target)
        return nbytes
    except BaseException as exc:
        if os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(exc, OSError):
            exc.filename = path
        raise


def put(
    store: str,
    key: str,
    directory: str,
    if_exists: IfExists,
    *,
    create: bool,
    escaped: bool,
) -> None:
    """Store every regular file below a directory; print a line for each that failed."""
    if not os.path.isdir(directory):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    prefix = f"{key.rstrip('/')}/" if key else ""
    name = escape if escaped else str
    files = sorted(
        (f"{prefix}{name(path)}", os.path.join(directory, path), nbytes)
        for path, nbytes in _files_below(directory)
    )
    status = 0
    with open_store(store, create=create) as opened, Meter("storing", len(files)) as meter:
        for batch in _batches(files):
            for result in _put_batch(opened, batch, if_exists):
                if isinstance(result, int):
                    meter.add(result)
                    continue
                with meter.paused():
                    if isinstance(result, kvio.InvalidKeyError) and not escaped:
                        status = max(status, complain(f"{result}; use --escape for such names"))
                    else:
                        status = max(status, complain_of(result))
    _finish("stored", meter, len(files), status)


def get(store: str, prefix: str, directory: str, *, escaped: bool) -> None:
    """Write every block with the prefix to a file; print a line for each that failed."""
    os.makedirs(directory, exist_ok=True)
    status = 0
    with open_store(store) as opened:
        keys = sorted(set(opened.list_keys(prefix)))
        if not keys:
            raise kvio.BlockNotFoundError(f"no key starts with {prefix!r}")
        fetch = partial(_fetch, opened, directory, unescape if escaped else str)
        with Meter("reading", len(keys)) as meter:
            for result in in_threads(fetch, keys, default_threads()):
                if isinstance(result, int):
                    meter.add(result)
                    continue
                with meter.paused():
                    status = max(status, complain_of(result))
    _finish("read", meter, len(keys), status)


def _finish(verb: str, meter: Meter, wanted: int, status: int) -> None:
    print_line(f"{verb} {meter.blocks} of {wanted} blocks, {meter.rate}")
    if status:
        raise typer.Exit(status)


def _files_below(directory: str, below: str = "") -> Iterator[tuple[str, int]]:
    """Yield the relative path and size of each regular file; do not follow links."""
    with os.scandir(os.path.join(directory, below)) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(directory, f"{below}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield f"{below}{entry.name}", entry.stat().st_size


def _batches(files: Sequence[_File]) -> Iterator[list[_File]]:
    batch: list[_File] = []
    room = _BATCH_BYTES
    for file in files:
        if batch and (file[2] > room or len(batch) == _BATCH_FILES):
            yield batch
            batch, room = [], _BATCH_BYTES
        batch.append(file)
        room -= file[2]
    if batch:
        yield batch


def _put_batch(
    store: kvio.Store, batch: Sequence[_File], if_exists: IfExists
) -> Iterator[int | Exception]:
    """Store a batch; yield the length of each file, or its error."""
    items: list[tuple[str, memoryview]] = []
    results: list[kvio.BlockResult] = []
    left = _BATCH_BYTES
    for key, path, _ in batch:
        try:
            with open(path, "rb", buffering=0) as file:
                nbytes = _rest_of(file)
                if nbytes is None or nbytes > left:  # too long for the batch's memory
                    yield put_file(store, key, file, if_exists).nbytes
                    continue
                data = kvio.aligned_buffer(nbytes)
                _fill(data, file, path)
        except (OSError, kvio.KvioError) as exc:
            yield exc
        else:
            items.append((key, data))
            left -= nbytes
    while items:
        try:
            results = store.write_blocks(items, if_exists=if_exists)
            break
        except kvio.InvalidKeyError as exc:
            yield exc
            items = [item for item in items if item[0] != exc.key]
    for result in results:
        yield result.error or result.nbytes


def _fill(room: memoryview, file: FileIO, path: str) -> None:
    done = 0
    while done < len(room):
        count = _read(file, room[done:])
        if not count:
            raise OSError(f"{path}: the file was truncated while it was read")
        done += count


def _fetch(
    store: kvio.Store, directory: str, name: Callable[[str], str], key: str
) -> int | Exception:
    """Write one block to its file; return its length, or the error."""
    pieces = read_pieces(store, key)
    try:
        path = os.path.join(directory, name(key))
        pieces = chain((next(pieces),), pieces)  # create no directory for an unreadable block
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return write_file(path, pieces)
    except (kvio.KvioError, OSError) as exc:
        return exc
