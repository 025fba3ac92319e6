"""Implement shared: show, verify, recover and abort shared files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from typing import Annotated, Final, TypeAlias

import typer

import kvio
from kvio.cli.output import (
    BAD_BLOCK,
    bytes_bar,
    complain,
    default_threads,
    format_bytes,
    format_checksum,
    guarded,
    in_threads,
    print_line,
)

_MAX_PRINTED: Final = 20

PathArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", help="The path that the file has once it is sealed.")
]

shared = typer.Typer()


@shared.callback(invoke_without_command=True)
def _shared(context: typer.Context) -> None:
    """Show, verify, finish or remove shared files.

    A shared file is one file of which many processes write a part each; see docs/sharedfile.md.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def status(
    path: PathArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the state of a file, its writers, and the missing bytes.

    Changes nothing. Exit status 0: the file exists, sealed or not; 1: it does not exist, or cannot
    be read.
    """
    found = kvio.SharedFile.status(path)
    if as_json:
        print_line(json.dumps({**dataclasses.asdict(found), "owed_bytes": found.owed_bytes}))
        return
    print_line(f"{found.path}: {_in_words(found)}")
    kept = {"file": "in the file", "sidecar": "in a sidecar", "none": "none"}[found.checksums]
    print_line(f"  size       {format_bytes(found.size)} ({found.size} bytes)")
    print_line(f"  writers    {found.writers}")
    print_line(f"  checksums  {kept}")
    for rank, nbytes in islice(found.owed.items(), _MAX_PRINTED):
        writes = "being written" if rank in found.writing else "no writer"
        print_line(f"  rank {rank:<5} {writes}, {format_bytes(nbytes)} missing")
    if len(found.owed) > _MAX_PRINTED:
        print_line(f"  and {len(found.owed) - _MAX_PRINTED} more ranks")
    for rank, number in found.failures.items():
        print_line(f"  rank {rank:<5} failed: {os.strerror(number)}")
    if found.state != "sealed" and not found.sealer:
        print_line(
            f"  no process seals it: kvio shared recover {path}, or kvio shared abort {path}"
        )


def _in_words(found: kvio.SharedFileStatus) -> str:
    if found.state == "sealed":
        return "sealed"
    if not found.this_boot:
        return "left unfinished before this machine was started, or on another machine"
    if found.state == "failed":
        return "cannot be finished: I/O failed; abort it"
    doing = {
        "preparing": "being created",
        "open": "being written",
        "sealing": "being sealed",
        "aborted": "being removed",
    }[found.state]
    if not found.sealer:
        doing = "left unfinished by a process that is gone"
    rest = f"{format_bytes(found.owed_bytes)} missing" if found.owed else "nothing missing"
    return f"{doing}, {rest}"


def verify(
    path: PathArgument,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Cells to check at once; default: by CPU count."),
    ] = None,
) -> None:
    """Verify every byte of a sealed file.

    Prints each bad cell, then a summary. Exit status 0: all are good; 1: a cell is corrupt, or
    there is no such file; 2: the file has no checksums.
    """
    with kvio.SharedFile.open(path) as file:
        if kvio.SharedFile.status(path).checksums == "none":
            raise kvio.UnsupportedError(f"{path} was written without checksums: nothing to verify")
        cells, bad = file.cells(), 0
        with bytes_bar("verifying", file.size) as done:
            for cell, error in in_threads(_checker(file), cells, threads or default_threads()):
                done(cell.nbytes)
                if error is not None:
                    bad += 1
                    print_line(f"bad {error}")
        print_line(f"{path}: {len(cells)} cells checked, {bad} bad")
    if bad:
        raise typer.Exit(BAD_BLOCK)


def _checker(
    file: kvio.SharedFile,
) -> Callable[[kvio.Extent], tuple[kvio.Extent, kvio.KvioError | None]]:
    def check(cell: kvio.Extent) -> tuple[kvio.Extent, kvio.KvioError | None]:
        try:
            file.pread_into(bytearray(cell.nbytes), cell.offset)
        except (kvio.CorruptBlockError, kvio.StorageError) as exc:
            return cell, exc
        return cell, None

    return check


def recover(path: PathArgument) -> None:
    """Seal a file whose creator has died, if every byte was written.

    Reads the written bytes from the disk, compares them with their checksums, and seals the file.
    If bytes are missing, prints them and changes nothing. Exit status 0: the file is sealed; 1: it
    is not.
    """
    file = kvio.SharedFile.recover(path)
    with closing(file):  # not "with file", which would abort it after an exception
        if file.mode is None:
            print_line(f"{path} was already sealed")
            return
        missing = file.missing()
        if missing:
            _print_missing(path, missing)
            raise typer.Exit(BAD_BLOCK)
        receipt = file.seal()
        print_line(
            f"sealed {path}: {receipt.nbytes} bytes, {receipt.level}, "
            f"crc32c {format_checksum(receipt.checksum)}"
        )


def _print_missing(path: str, missing: Sequence[kvio.Missing]) -> None:
    for rank, offset, nbytes in missing[:_MAX_PRINTED]:
        print_line(f"missing {nbytes} bytes from {offset}, of rank {rank}")
    if len(missing) > _MAX_PRINTED:
        print_line(f"and {len(missing) - _MAX_PRINTED} more ranges")
    nbytes = sum(extent.nbytes for extent in missing)
    complain(
        f"{path} lacks {format_bytes(nbytes)}: write them with SharedFile.recover, or "
        f"remove the file with kvio shared abort {path}"
    )


def abort(path: PathArgument) -> None:
    """Remove an unsealed file whose creator has died.

    A file that is being written or is sealed is not changed. Exit status 0: the file was removed;
    1: it did not exist; 2: it is being written, is sealed, or cannot be removed.
    """
    state = kvio.SharedFile.status(path).state
    if state == "sealed":
        raise kvio.BlockExistsError(f"{path} is sealed: remove it with rm", key=path)
    try:
        file = kvio.SharedFile.recover(path)
    except kvio.BlockNotFoundError:  # recover() completed an interrupted abort
        print_line(f"removed the unfinished file {path}")
        return
    with file:
        file.abort()
    print_line(f"removed the unfinished file {path}")


COMMANDS: Final = (
    ("status", status, "  kvio shared status ckpt.bin\n  kvio shared status ckpt.bin --json"),
    ("verify", verify, "  kvio shared verify ckpt.bin && echo clean"),
    ("recover", recover, "  kvio shared recover ckpt.bin"),
    ("abort", abort, "  kvio shared abort ckpt.bin"),
)
for _name, _command, _epilog in COMMANDS:
    shared.command(_name, epilog=f"\b\nExamples:\n{_epilog}")(guarded(_command))
