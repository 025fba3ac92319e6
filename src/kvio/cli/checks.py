"""verify and sweep: is what is stored still good, and what did dead writers leave?"""

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
from kvio.quarantine import open_directory


def verify(
    store: StoreArgument,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that start so.")] = "",
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Blocks to check at once; default: by processors."),
    ] = None,
    delete_corrupt: Annotated[
        bool, typer.Option("--delete-corrupt", help="Remove the blocks that are corrupt.")
    ] = False,
    quarantine: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Move the blocks that are corrupt into this directory, as they are stored; it is "
            "made if need be, and no file in it is ever replaced.",
        ),
    ] = None,
) -> None:
    """Check every block to its last byte.

    Prints each bad block with its reason, then a summary. Each that is to be removed is checked
    again right before, so that one that was written anew stays.
    Exit status 0: all are good, or every bad one was removed or is good by now; 1: bad ones are
    left; 2: the store could not be checked, or nothing can be done with these options.
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
            help="How long ago the leftover of another machine's writer must have been written "
            "last, such as 30s, 15m, 24h or 7d; longer than any write takes.",
        ),
    ] = "24h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only name them; remove nothing.")
    ] = False,
) -> None:
    """Remove leftovers of writers that died.

    Where the file system has O_TMPFILE there are none. A writer on this machine is dead
    when its process is; of one on another machine only the age of its file tells.
    """
    seconds = parse_duration(older_than)
    with open_store(store) as opened:
        paths = opened.sweep(older_than_s=seconds, dry_run=dry_run)
    for path in sorted(paths):
        print_line(path)
    done = "would be removed" if dry_run else "removed"
    sys.stderr.write(f"{len(paths)} leftover{'' if len(paths) == 1 else 's'} {done}\n")


def _prepare_removal(store: kvio.Store, quarantine: str | None) -> None:
    """Refuse what cannot be done before anything is."""
    if not store.capabilities.writable:
        raise kvio.AccessDeniedError(
            f"store {store.url.place} is open read-only: verify it without --delete-corrupt and "
            "--quarantine",
            errno=errno.EROFS,
        )
    if not store.capabilities.raw_blocks:
        raise kvio.UnsupportedError(
            f"a {store.url.scheme} store does not hand out blocks as they are stored: verify it "
            "without --delete-corrupt and --quarantine, and remove blocks by kvio rm"
        )
    if quarantine is None:
        return
    root = store.url.options.get("root") or store.url.path
    if root and not store.url.host:
        inside, outer = os.path.realpath(quarantine), os.path.realpath(str(root))
        if os.path.commonpath((inside, outer)) == outer:
            raise typer.BadParameter(f"--quarantine {quarantine}: it lies in the store itself")
    os.close(open_directory(quarantine))
    if not os.access(quarantine, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), quarantine)


def _remove(store: kvio.Store, corrupt: Sequence[str], quarantine: str | None) -> tuple[int, int]:
    """Remove blocks and print a line each; how many are gone, and how many are good by now."""
    removed = good = 0
    for key in corrupt:
        removal = store.remove_corrupt(key, quarantine=quarantine)
        if removal.status is kvio.BlockStatus.CORRUPT:
            removed += 1
            print_line(f"moved {key} to {removal.path}" if removal.path else f"removed {key}")
        elif removal.error is None or removal.status is kvio.BlockStatus.MISSING:
            good += 1
            print_line(f"kept {key}: it is good by now" if removal.error is None else f"gone {key}")
        else:
            print_line(f"left {key}: {removal.error}")
    return removed, good


def _print_bad(meter: Meter, key: str, reason: str) -> None:
    with meter.paused():
        print_line(f"bad {key}: {reason}")
        sys.stdout.flush()


def _report_misplaced(store: kvio.Store, meter: Meter, gone: Sequence[str]) -> int:
    """Tell blocks that were deleted meanwhile from files that lie where no reader looks."""
    if not gone:
        return 0
    listed = set(store.list_keys())
    misplaced = [key for key in gone if key in listed]
    for key in misplaced:
        _print_bad(meter, key, "its file lies in the wrong directory, where no reader looks")
    return len(misplaced)


def _summarize(store: kvio.Store, meter: Meter, bad: int, removed: int, how: str) -> None:
    blocks = "1 block" if meter.blocks == 1 else f"{meter.blocks} blocks"
    verdict = f"{bad} bad" if bad else "all good"
    if removed:
        verdict += f", {removed} {how}"
    print_line(f"{blocks} checked, {verdict} ({meter.rate})")
    if not store.capabilities.checksum:
        complain("no checksums here: only names and lengths could be checked")


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
