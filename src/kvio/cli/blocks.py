"""Implement put, get, ls, stat and rm, for one block and for directories."""

from __future__ import annotations

import datetime as dt
import errno
import os
import re
import secrets
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from io import FileIO
from itertools import chain
from typing import Annotated, Final, TypeAlias

import typer

import kvio
from kvio.cli.output import (
    BAD_BLOCK,
    FAILED,
    CreateOption,
    Meter,
    StoreArgument,
    bytes_bar,
    complain,
    complain_of,
    default_threads,
    format_bytes,
    format_checksum,
    in_threads,
    open_store,
    print_line,
    receipt_line,
    write_stdout,
)
from kvio.types import IfExists

KeyArgument = Annotated[
    str,
    typer.Argument(metavar="KEY", help="The block's name: letters, digits, ._=@+- and /."),
]


class IfExistsChoice(StrEnum):
    """The ways in which put treats an existing block."""

    KEEP = "keep"
    REPLACE = "replace"
    ERROR = "error"


def put(
    store: StoreArgument,
    key: KeyArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to store; - is standard input.")
    ] = "-",
    if_exists: Annotated[
        IfExistsChoice,
        typer.Option(
            help="If the key exists: keep an intact block of the same length, replace the block, "
            "or fail."
        ),
    ] = IfExistsChoice.KEEP,
    recursive: Annotated[
        bool,
        typer.Option(
            "--recursive",
            "-r",
            help="FILE is a directory: store every file below it under KEY/its/path "
            "(an empty KEY '' stores it under its path).",
        ),
    ] = False,
    escape: Annotated[
        bool,
        typer.Option(
            "--escape",
            help="With -r: also store names that are not valid keys, such as .profile as "
            "_=2Eprofile; get --prefix --escape restores them.",
        ),
    ] = False,
    move: Annotated[
        bool,
        typer.Option(
            "--move",
            help="Take FILE: it is gone when it is stored, by a rename where FILE is on the file "
            "system of a store of files. No other process may have it open.",
        ),
    ] = False,
    create: CreateOption = False,
) -> None:
    """Store a file as a block.

    The write is atomic: readers see the whole block or none.
    Prints the receipt: length, level (visible: every reader sees the block; durable: it
    survives a power loss), I/O mode and the reason for it, and checksum.
    """
    if move and (recursive or file == "-"):
        raise typer.BadParameter("--move takes one FILE")
    if recursive:
        put_many(store, key, file, if_exists.value, create=create, escaped=escape)
        return
    if escape:
        raise typer.BadParameter("--escape needs -r")
    if move:
        with open_store(store, create=create) as opened:
            receipt = opened.write_file(key, file, move=True, if_exists=if_exists.value)
        print_line(receipt_line(receipt))
        return
    with _input(file) as source, open_store(store, create=create) as opened:
        receipt = put_file(opened, key, source, if_exists.value, shown=True)
    print_line(receipt_line(receipt))


def get(
    store: StoreArgument,
    key: KeyArgument,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The file to write; - is standard output."),
    ] = None,
    offset: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start at this byte of the block.")
    ] = 0,
    nbytes: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Read at most N bytes; default: to the end of the block."
        ),
    ] = None,
    prefix: Annotated[
        bool,
        typer.Option(
            "--prefix",
            help="FILE is a directory: write every block whose key starts with KEY to "
            "FILE/the/key ('' selects all blocks).",
        ),
    ] = False,
    escape: Annotated[
        bool,
        typer.Option(
            "--escape", help="With --prefix: restore the file names stored by put -r --escape."
        ),
    ] = False,
) -> None:
    """Read a block, verify it, and write it to a file.

    A whole block is verified against its checksum before any of it is written to FILE. With
    --offset or --nbytes a part is read, and only the block's length and key are verified.
    """
    if prefix:
        if file in (None, "-") or offset or nbytes is not None:
            raise typer.BadParameter(
                "--prefix needs a directory as FILE, and excludes --offset and --nbytes"
            )
        get_many(store, key, str(file), escaped=escape)
        return
    if escape:
        raise typer.BadParameter("--escape needs --prefix")
    if file is None and sys.stdout.isatty():
        raise typer.BadParameter("a block is binary: name a FILE, or - to print it to the terminal")
    with open_store(store) as opened:
        if file in (None, "-"):
            pieces = read_pieces(opened, key, offset, nbytes, checked_first=True)
            for piece in shown(opened, key, offset, nbytes, pieces):
                write_stdout(piece)
        else:
            pieces = read_pieces(opened, key, offset, nbytes)
            write_file(str(file), shown(opened, key, offset, nbytes, pieces))


def list_blocks(
    store: StoreArgument,
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Only keys with this prefix.")
    ] = "",
    long: Annotated[
        bool,
        typer.Option("--long", "-l", help="Also print size in bytes, time of the write, CRC32C."),
    ] = False,
) -> None:
    """List the keys of a store, sorted, one per line."""
    status = 0
    with open_store(store) as opened:
        for key in sorted(set(opened.list_keys(prefix))):
            if not long:
                print_line(key)
                continue
            try:
                print_line(_long_line(opened.stat_block(key)))
            except kvio.BlockNotFoundError:
                continue  # deleted after it was listed
            except kvio.KvioError as exc:
                status = max(status, complain_of(exc))
    if status:
        raise typer.Exit(status)


def stat_block(store: StoreArgument, key: KeyArgument) -> None:
    """Describe a block from its trailer, without reading its payload."""
    with open_store(store) as opened:
        found = opened.stat_block(key)
    print_line(f"key      {found.key}")
    print_line(f"size     {found.nbytes} bytes ({format_bytes(found.nbytes)})")
    print_line(f"stored   {found.stored_nbytes} bytes, with padding and trailer")
    print_line(f"crc32c   {format_checksum(found.checksum)}")
    print_line(f"written  {_when(found.mtime_ns)}")


def remove(
    store: StoreArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="The blocks to remove.")],
) -> None:
    """Remove blocks.

    Exit status 1 if one of them did not exist.
    """
    status = 0
    with open_store(store) as opened:
        for result in opened.delete_blocks(keys):
            if result.status is kvio.BlockStatus.MISSING:
                status = max(status, complain(f"no block {result.key!r}", BAD_BLOCK))
            elif result.error is not None:
                status = max(status, complain(str(result.error), FAILED))
    if status:
        raise typer.Exit(status)


def _long_line(found: kvio.BlockStat) -> str:
    checksum = format_checksum(found.checksum)
    return f"{found.nbytes:>14}  {_when(found.mtime_ns)}  {checksum:>8}  {found.key}"


def _when(mtime_ns: int | None) -> str:
    if mtime_ns is None:
        return "unknown"
    moment = dt.datetime.fromtimestamp(mtime_ns // 10**9, dt.UTC).astimezone()
    return moment.strftime("%Y-%m-%d %H:%M:%S %z")


def _input(file: str) -> FileIO:
    """Open the file to store; standard input is not closed."""
    if file != "-":
        return open(file, "rb", buffering=0)
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("nothing to store: name a FILE, or pipe bytes into kvio put")
    return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)


COMMANDS: Final = (
    (
        "put",
        put,
        "  kvio put /mnt/kv weights/layer-0 layer0.bin\n"
        "  tar c data | kvio put /mnt/kv backups/monday\n"
        "  kvio put 'hybrid:///mnt/kv?durability=durable' run7/step-100 state.bin\n"
        "  kvio put -r /mnt/kv datasets/cats ./cats\n"
        "  kvio put -r --escape /mnt/kv home ~\n"
        "  kvio put --create ./new/store notes notes.txt",
    ),
    (
        "get",
        get,
        "  kvio get /mnt/kv weights/layer-0 layer0.bin\n"
        "  kvio get /mnt/kv backups/monday - | tar x\n"
        "  kvio get /mnt/kv weights/layer-0 --offset 4096 --nbytes 64 - | xxd\n"
        "  kvio get --prefix /mnt/kv datasets/cats/ ./restored",
    ),
    (
        "ls",
        list_blocks,
        "  kvio ls /mnt/kv\n  kvio ls -l /mnt/kv weights/\n  kvio ls /mnt/kv | wc -l",
    ),
    ("stat", stat_block, "  kvio stat /mnt/kv weights/layer-0"),
    ("rm", remove, "  kvio rm /mnt/kv weights/layer-0 weights/layer-1"),
)


# --------------------------------------------------------------------------------------------------
# Convert file names to keys and back, for ``put -r --escape`` and ``get --prefix --escape``.
#
# In each part of a path, a byte that is not allowed in a key becomes ``=`` and two hexadecimal
# digits; so does ``=`` itself. If the result cannot begin a part of a key, its first byte is
# escaped too and ``_`` is prepended: ``.bashrc`` is ``_=2Ebashrc``, and ``my file`` is
# ``my=20file``.


_INVALID: Final = re.compile(rb"[^A-Za-z0-9._@+-]")
_INVALID_START: Final = re.compile(rb"[^A-Za-z0-9_]|_=")
_NOT_IN_NAMES: Final = re.compile(rb"[/\0]")
_ESCAPED: Final = re.compile(rb"=([0-9A-F]{2})")


def escape(path: str) -> str:
    """Return the key for a path of names joined by ``/``."""
    return "/".join(_escape_part(os.fsencode(part)).decode() for part in path.split("/"))


def _escape_part(name: bytes) -> bytes:
    part = _INVALID.sub(_code, name)
    if not _INVALID_START.match(part):
        return part
    return b"_=%02X" % name[0] + _INVALID.sub(_code, name[1:])


def _code(match: re.Match[bytes]) -> bytes:
    return b"=%02X" % match[0][0]


def unescape(key: str) -> str:
    """Return the path for a key from `escape`; parts that `escape` did not make are kept."""
    return "/".join(os.fsdecode(_unescape_part(part.encode())) for part in key.split("/"))


def _unescape_part(part: bytes) -> bytes:
    name = part[1:] if part.startswith(b"_=") else part
    name = _ESCAPED.sub(lambda match: bytes((int(match[1], 16),)), name)
    # No file name has a slash or a NUL byte; "." and ".." would leave the target directory.
    valid = name not in (b".", b"..") and not _NOT_IN_NAMES.search(name)
    return name if valid and _escape_part(name) == part else part


# --------------------------------------------------------------------------------------------------
# Copy directories and files to and from a store.


#: A key, a path and a size in bytes.
_File: TypeAlias = tuple[str, str, int]


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
    """Yield a block, or a part of it, with bounded memory; see `kvio.core.streams.read`."""
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


def put_many(
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


def get_many(store: str, prefix: str, directory: str, *, escaped: bool) -> None:
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
