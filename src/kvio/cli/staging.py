"""Implement stage-daemon: staging memory that outlives its client processes."""

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
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.daemon.sockets import name_of
from kvio.staging.options import TierOptions, default_drain_threads
from kvio.url import parse_size

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class DrainFrom(StrEnum):
    """When draining starts."""

    ACCEPT = "accept"
    HIGH_WATER = "high_water"


def stage_daemon(
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="A directory, or a URL such as hybrid:///mnt/kv. Clients must use the same one.",
        ),
    ],
    socket: Annotated[
        str,
        typer.Option(
            "--socket",
            metavar="PATH",
            help="Socket to listen on. Its directory must be private (0700); created if missing.",
        ),
    ],
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Staging memory; it is never exceeded.")
    ] = "8GiB",
    drain_threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Concurrent writes; default: one per processor."),
    ] = None,
    drain_from: Annotated[
        DrainFrom,
        typer.Option(
            help="Drain at once, or only above the high-water mark or when a writer waits, so that "
            "more overwrites are merged."
        ),
    ] = DrainFrom.ACCEPT,
    high_water: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="The high-water mark.")
    ] = 0.9,
    low_water: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Draining stops at this mark.")
    ] = 0.7,
    retries: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often a failed write is retried.")
    ] = 3,
    drain_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Timeout of the final drain, such as 30s; default: none."
        ),
    ] = None,
    numa_node: Annotated[
        int | None, typer.Option(metavar="N", help="NUMA node of the memory; default: any.")
    ] = None,
    populate: Annotated[
        bool, typer.Option("--populate", help="Allocate all memory at the start.")
    ] = False,
    create: CreateOption = False,
) -> None:
    """Accept writes of local processes in memory, and drain them to a store.

    Processes open the same STORE and write through kvio.stage(store, daemon=PATH). Accepted
    blocks are stored even if the process that wrote them is killed. Prints one line when it
    listens. On SIGTERM or Ctrl-C it accepts no more writes, stores everything, and ends; if that
    fails, it prints the keys and exits with status 2. A second signal ends it at once, and staged
    blocks are lost.
    """
    limit = None if drain_timeout is None else parse_duration(drain_timeout)
    # Block the signals before any thread starts, so that only sigwait() receives them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        with open_store(store, create=create) as opened:
            options = TierOptions(
                drain_threads=default_drain_threads(opened)
                if drain_threads is None
                else drain_threads,
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
                log=complain,
            )
            _announce(daemon)
            signal.sigwait(_STOP_SIGNALS)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            daemon.close(timeout=limit)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _announce(daemon: StageDaemon) -> None:
    capacity = format_bytes(daemon.core.memory.capacity_bytes)
    print_line(f"staging {name_of(daemon.core.store.url)} at {daemon.path}: {capacity}")
    sys.stdout.flush()


COMMANDS: Final = (
    (
        "stage-daemon",
        stage_daemon,
        "  kvio stage-daemon /mnt/kv --socket /run/user/1000/kvio/stage.sock\n"
        "  kvio stage-daemon 'hybrid:///mnt/kv?durability=durable' \\\n"
        "      --socket ~/.kvio/stage.sock --capacity 64GiB --drain-threads 8\n"
        "  kill -TERM PID                     store everything, then exit",
    ),
)
