"""Implement put, get, ls, stat and rm."""

from __future__ import annotations

import datetime as dt
import sys
from enum import StrEnum
from io import FileIO
from typing import Annotated, Final

import typer

import kvio
from kvio.cli import many
from kvio.cli.output import (
    BAD_BLOCK,
    FAILED,
    CreateOption,
    StoreArgument,
    complain,
    complain_of,
    format_bytes,
    format_checksum,
    open_store,
    print_line,
    receipt_line,
    write_stdout,
)

KeyArgument = Annotated[
    str,
    typer.Argument(metavar="KEY", help="The block's name: letters, digits, ._=@+- and /."),
]


class IfExists(StrEnum):
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
        IfExists,
        typer.Option(
            help="If the key exists: keep an intact block of the same length, replace the block, "
            "or fail."
        ),
    ] = IfExists.KEEP,
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
    create: CreateOption = False,
) -> None:
    """Store a file as a block.

    The write is atomic: readers see the whole block or none.
    Prints the receipt: length, level (visible: every reader sees the block; durable: it
    survives a power loss), I/O mode and the reason for it, and checksum.
    """
    if recursive:
        many.put(store, key, file, if_exists.value, create=create, escaped=escape)
        return
    if escape:
        raise typer.BadParameter("--escape needs -r")
    with _input(file) as source, open_store(store, create=create) as opened:
        receipt = many.put_file(opened, key, source, if_exists.value, shown=True)
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
        many.get(store, key, str(file), escaped=escape)
        return
    if escape:
        raise typer.BadParameter("--escape needs --prefix")
    if file is None and sys.stdout.isatty():
        raise typer.BadParameter("a block is binary: name a FILE, or - to print it to the terminal")
    with open_store(store) as opened:
        if file in (None, "-"):
            pieces = many.read_pieces(opened, key, offset, nbytes, checked_first=True)
            for piece in many.shown(opened, key, offset, nbytes, pieces):
                write_stdout(piece)
        else:
            pieces = many.read_pieces(opened, key, offset, nbytes)
            many.write_file(str(file), many.shown(opened, key, offset, nbytes, pieces))


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
