"""verify and sweep: is what is stored still good, and what did dead writers leave?"""

from __future__ import annotations

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


def verify(
    store: StoreArgument,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that start so.")] = "",
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Blocks to check at once; default: by processors."),
    ] = None,
) -> None:
    """Check every block to its last byte.

    Prints each bad block with its reason, then a summary. Exit status 0: all are good;
    1: some are bad; 2: the store could not be checked.
    """
    with open_store(store) as opened:
        keys = sorted(set(opened.list_keys(prefix)))
        bad, gone = 0, []
        with Meter("verifying", len(keys)) as meter:
            for result in in_threads(opened.verify_block, keys, threads or default_threads()):
                if result.status is kvio.BlockStatus.MISSING:
                    gone.append(result.key)
                elif result.error is not None:
                    bad += 1
                    _print_bad(meter, result.key, str(result.error))
                meter.add(result.nbytes)
        bad += _report_misplaced(opened, meter, gone)
        _summarize(opened, meter, bad)
    if bad:
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


def _summarize(store: kvio.Store, meter: Meter, bad: int) -> None:
    blocks = "1 block" if meter.blocks == 1 else f"{meter.blocks} blocks"
    verdict = f"{bad} bad" if bad else "all good"
    print_line(f"{blocks} checked, {verdict} ({meter.rate})")
    if not store.capabilities.checksum:
        complain("no checksums here: only names and lengths could be checked")


COMMANDS: Final = (
    (
        "verify",
        verify,
        "  kvio verify /mnt/kv\n"
        "  kvio verify /mnt/kv weights/ --threads 2\n"
        "  kvio verify /mnt/kv && echo clean",
    ),
    (
        "sweep",
        sweep,
        "  kvio sweep /mnt/kv --dry-run\n  kvio sweep /mnt/kv --older-than 7d",
    ),
)
