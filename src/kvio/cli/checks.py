"""Implement verify (check all blocks) and sweep (remove leftovers of dead writers)."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

import kvio
from kvio.cli.output import (
    BAD_BLOCK,
    Meter,
    StoreArgument,
    complain,
    default_threads,
    in_threads,
    open_store,
    parse_duration,
    print_line,
)
from kvio.core.damage import open_directory


def verify(
    store: StoreArgument,
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Only keys with this prefix.")
    ] = "",
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Blocks to check at once; default: by CPU count."),
    ] = None,
    delete_corrupt: Annotated[
        bool, typer.Option("--delete-corrupt", help="Remove corrupt blocks.")
    ] = False,
    quarantine: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Move corrupt blocks, as they are stored, into this directory; it is created if "
            "missing, and no file in it is ever replaced.",
        ),
    ] = None,
) -> None:
    """Read and verify every block.

    Prints each bad block with the reason, then a summary. A block is checked again right before
    its removal, so a block that was rewritten meanwhile is kept.
    Exit status 0: all blocks are good, or every bad one was removed or has been replaced by a
    good one; 1: bad blocks are left; 2: the store could not be checked with these options.
    """
    if delete_corrupt and quarantine is not None:
        raise typer.BadParameter("--delete-corrupt and --quarantine exclude each other")
    with open_store(store) as opened:
        if delete_corrupt or quarantine is not None:
            _prepare_removal(opened, quarantine)
        keys = sorted(set(opened.list_keys(prefix)))
        bad, gone, corrupt = 0, [], []
        with Meter("verifying", len(keys)) as meter:
            for result in in_threads(opened.verify_block, keys, threads or default_threads()):
                if result.status is kvio.BlockStatus.MISSING:
                    gone.append(result.key)
                elif result.error is not None:
                    bad += 1
                    _print_bad(meter, result.key, str(result.error))
                if result.status is kvio.BlockStatus.CORRUPT:
                    corrupt.append(result.key)
                meter.add(result.nbytes)
        bad += _report_misplaced(opened, meter, gone)
        removed = good = 0
        if delete_corrupt or quarantine is not None:
            removed, good = _remove(opened, corrupt, quarantine)
        _summarize(opened, meter, bad, removed, "moved" if quarantine else "removed")
    if bad > removed + good:
        raise typer.Exit(BAD_BLOCK)


def sweep(
    store: StoreArgument,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="AGE",
            help="Minimum time since the last write to a leftover of another machine, such as "
            "30s, 15m, 24h or 7d; longer than any write takes.",
        ),
    ] = "24h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only list them; remove nothing.")
    ] = False,
) -> None:
    """Remove leftovers of dead writers.

    With O_TMPFILE there are none. A writer on this machine is dead if its process has ended.
    A writer on another machine is taken for dead if its file is older than AGE.
    """
    seconds = parse_duration(older_than)
    with open_store(store) as opened:
        paths = opened.sweep(older_than_s=seconds, dry_run=dry_run)
    for path in sorted(paths):
        print_line(path)
    done = "would be removed" if dry_run else "removed"
    sys.stderr.write(f"{len(paths)} leftover{'' if len(paths) == 1 else 's'} {done}\n")


def _prepare_removal(store: kvio.Store, quarantine: str | None) -> None:
    """Raise an error before any block is checked if corrupt blocks cannot be removed."""
    if not store.capabilities.writable:
        raise kvio.AccessDeniedError(
            f"store {store.url.place} is open read-only: verify it without --delete-corrupt and "
            "--quarantine",
            errno=errno.EROFS,
        )
    if not store.capabilities.raw_blocks:
        raise kvio.UnsupportedError(
            f"a {store.url.scheme} store cannot read blocks as they are stored: verify it "
            "without --delete-corrupt and --quarantine, and remove blocks with kvio rm"
        )
    if quarantine is None:
        return
    root = store.url.options.get("root") or store.url.path
    if root and not store.url.host:
        inside, outer = os.path.realpath(quarantine), os.path.realpath(str(root))
        if os.path.commonpath((inside, outer)) == outer:
            raise typer.BadParameter(
                f"--quarantine {quarantine}: choose a directory outside the store"
            )
    os.close(open_directory(quarantine))
    if not os.access(quarantine, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), quarantine)


def _remove(store: kvio.Store, corrupt: Sequence[str], quarantine: str | None) -> tuple[int, int]:
    """Remove corrupt blocks, print a line for each, and return (removed, no longer bad)."""
    removed = good = 0
    for key in corrupt:
        removal = store.remove_corrupt(key, quarantine=quarantine)
        if removal.status is kvio.BlockStatus.CORRUPT:
            removed += 1
            print_line(f"moved {key} to {removal.path}" if removal.path else f"removed {key}")
        elif removal.error is None or removal.status is kvio.BlockStatus.MISSING:
            good += 1
            print_line(f"kept {key}: it is good now" if removal.error is None else f"gone {key}")
        else:
            print_line(f"left {key}: {removal.error}")
    return removed, good


def _print_bad(meter: Meter, key: str, reason: str) -> None:
    with meter.paused():
        print_line(f"bad {key}: {reason}")
        sys.stdout.flush()


def _report_misplaced(store: kvio.Store, meter: Meter, gone: Sequence[str]) -> int:
    """Print blocks whose file is in the wrong directory, but not blocks deleted meanwhile."""
    if not gone:
        return 0
    listed = set(store.list_keys())
    misplaced = [key for key in gone if key in listed]
    for key in misplaced:
        _print_bad(meter, key, "its file is in the wrong directory, so no reader finds it")
    return len(misplaced)


def _summarize(store: kvio.Store, meter: Meter, bad: int, removed: int, how: str) -> None:
    blocks = "1 block" if meter.blocks == 1 else f"{meter.blocks} blocks"
    verdict = f"{bad} bad" if bad else "all good"
    if removed:
        verdict += f", {removed} {how}"
    print_line(f"{blocks} checked, {verdict} ({meter.rate})")
    if not store.capabilities.checksum:
        complain("the store has no checksums: only names and lengths were checked")


COMMANDS: Final = (
    (
        "verify",
        verify,
        "  kvio verify /mnt/kv\n"
        "  kvio verify /mnt/kv weights/ --threads 2\n"
        "  kvio verify /mnt/kv && echo clean\n"
        "  kvio verify /mnt/kv --delete-corrupt\n"
        "  kvio verify /mnt/kv --quarantine /var/tmp/damaged",
    ),
    (
        "sweep",
        sweep,
        "  kvio sweep /mnt/kv --dry-run\n  kvio sweep /mnt/kv --older-than 7d",
    ),
)
