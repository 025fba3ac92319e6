"""stage-daemon: staging memory that outlives the processes that write to it."""

from __future__ import annotations

import signal
import sys
from enum import StrEnum
from typing import Annotated, Final

import typer

from kvio.cli.output import (
    CreateOption,
    complain,
    format_bytes,
    open_store,
    parse_duration,
    print_line,
)
from kvio.url import parse_size
from kvio.wrappers.staging.daemon.naming import name_of
from kvio.wrappers.staging.daemon.server import StageDaemon
from kvio.wrappers.staging.options import TierOptions

_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class DrainFrom(StrEnum):
    """When drains begin."""

    ACCEPT = "accept"
    HIGH_WATER = "high_water"


def stage_daemon(
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="A directory, or a URL such as hybrid:///mnt/kv. Clients open theirs by the same.",
        ),
    ],
    socket: Annotated[
        str,
        typer.Option(
            "--socket",
            metavar="PATH",
            help="Where to listen. Its directory must be ours alone (0700); it is made if missing.",
        ),
    ],
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Staging memory; it is never exceeded.")
    ] = "8GiB",
    drain_threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Writes of the store at once; default: as stores."),
    ] = None,
    drain_from: Annotated[
        DrainFrom,
        typer.Option(
            help="Store at once, or only from the high mark on and when somebody waits, so that "
            "more overwrites absorb each other."
        ),
    ] = DrainFrom.ACCEPT,
    high_water: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="The high mark.")
    ] = 0.9,
    low_water: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Down to which it is drained.")
    ] = 0.7,
    retries: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often a failed write is made again.")
    ] = 3,
    drain_timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long ending may take, such as 30s; default: all."),
    ] = None,
    numa_node: Annotated[
        int | None, typer.Option(metavar="N", help="Where the memory lies; default: anywhere.")
    ] = None,
    populate: Annotated[
        bool, typer.Option("--populate", help="Get all of the memory at once, not as it is used.")
    ] = False,
    create: CreateOption = False,
) -> None:
    """Take writes of local processes into memory, and store them behind their backs.

    Processes open the same STORE and write through kvio.stage(store, daemon=PATH). What was
    accepted is stored even if they are killed. Prints one line when it listens. SIGTERM and
    Ctrl-C: takes no more, stores everything, and ends; exit status 2 and the keys where that is
    not possible. A second one ends it at once, and what is staged is lost.
    """
    limit = None if drain_timeout is None else parse_duration(drain_timeout)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # before any thread: all leave them to us
    try:
        with open_store(store, create=create) as opened:
            options = TierOptions(
                drain_threads=opened.io_threads if drain_threads is None else drain_threads,
                high_water=high_water,
                low_water=low_water,
                drain_from=drain_from.value,
                retries=retries,
            )
            daemon = StageDaemon(
                opened,
                socket,
                capacity_bytes=parse_size(capacity),
                options=options,
                numa_node=numa_node,
                populate=populate,
                tell=complain,
            )
            _announce(daemon)
            signal.sigwait(_ENDING)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            daemon.close(timeout=limit)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _announce(daemon: StageDaemon) -> None:
    room = format_bytes(daemon.custody.memory.capacity_bytes)
    print_line(f"staging {name_of(daemon.custody.store.url)} at {daemon.path}: {room}")
    sys.stdout.flush()


COMMANDS: Final = (
    (
        "stage-daemon",
        stage_daemon,
        "  kvio stage-daemon /mnt/kv --socket /run/user/1000/kvio/stage.sock\n"
        "  kvio stage-daemon 'hybrid:///mnt/kv?durability=durable' \\\n"
        "      --socket ~/.kvio/stage.sock --capacity 64GiB --drain-threads 8\n"
        "  kill -TERM PID                     store everything, then end",
    ),
)
