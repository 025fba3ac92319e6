"""Whole directories in and out, and files read and written whole."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, Literal, TypeAlias

import typer

import kvio
from kvio.cli.output import (
    Meter,
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


def read_file(path: str) -> memoryview:
    """Read a file into page-aligned memory, which direct I/O takes without a copy."""
    with open(path, "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            return memoryview(file.read())
        data = kvio.aligned_buffer(info.st_size)
        done = 0
        while done < len(data):
            count = file.readinto(data[done:])
            if not count:
                raise OSError(f"{path}: became shorter while it was read")
            done += count
        return data


def write_file(path: str, data: memoryview) -> None:
    """Write a file whole or not at all; what is no regular file is written as it is."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            file.write(data)
        return
    target = os.path.realpath(path)
    temporary = f"{target}.{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException as exc:
        if os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(exc, OSError):
            exc.filename = path
        raise


def put(store: str, key: str, directory: str, if_exists: IfExists) -> None:
    """Store every regular file below a directory; a line for each that could not be."""
    if not os.path.isdir(directory):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    prefix = f"{key.rstrip('/')}/" if key else ""
    files = sorted(_files_below(directory, prefix))
    status = 0
    with open_store(store) as opened, Meter("storing", len(files)) as meter:
        for batch in _batches(files):
            for result in _put_batch(opened, batch, if_exists):
                if isinstance(result, int):
                    meter.add(result)
                    continue
                with meter.paused():
                    status = max(status, complain_of(result))
    _finish("stored", meter, len(files), status)


def get(store: str, prefix: str, directory: str) -> None:
    """Write every block whose key starts with *prefix* to a file; a line for each that failed."""
    os.makedirs(directory, exist_ok=True)
    status = 0
    with open_store(store) as opened:
        keys = sorted(set(opened.list_keys(prefix)))
        if not keys:
            raise kvio.BlockNotFoundError(f"no key starts with {prefix!r}")
        fetch = partial(_fetch, opened, directory)
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


def _files_below(directory: str, prefix: str) -> Iterator[_File]:
    """Yield key, path and size of regular files; links are not followed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield f"{prefix}{entry.name}", entry.path, entry.stat().st_size


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
    """Store a batch; yields the bytes of each file, or its error."""
    items: list[tuple[str, memoryview]] = []
    for key, path, _ in batch:
        try:
            items.append((key, read_file(path)))
        except OSError as exc:
            yield exc
    while True:
        try:
            results = store.write_blocks(items, if_exists=if_exists)
            break
        except kvio.InvalidKeyError as exc:
            yield exc
            items = [item for item in items if item[0] != exc.key]
    for result in results:
        yield result.error or result.nbytes


def _fetch(store: kvio.Store, directory: str, key: str) -> int | Exception:
    """Read one block into its file; its bytes, or the error."""
    path = os.path.join(directory, key)
    try:
        block = store.read_block(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, block)
    except (kvio.KvioError, OSError) as exc:
        return exc
    return len(block)
