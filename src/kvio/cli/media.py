"""doctor and tune: what a medium can do, and what is fastest on it."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

import typer
from rich.progress import TimeElapsedColumn

from kvio import doctor as doctors
from kvio import tuning
from kvio.cli import tables
from kvio.cli.output import FAILED, complain, parse_duration, print_line, progress_bar

Durability: TypeAlias = Literal["visible", "durable"]


class Writes(StrEnum):
    """What a write figure includes."""

    VISIBLE = "visible"
    DURABLE = "durable"


def doctor(
    target: Annotated[str, typer.Argument(metavar="PATH|URL", help="A directory, or a store URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Find out what a medium can do.

    Answers by trying, and recommends a backend with its options. Makes and removes a few
    small files; leaves nothing behind. Exits with 2 where no store opens by the URL.
    """
    diagnosis = doctors.diagnose(target)
    if as_json:
        print_line(json.dumps(diagnosis.as_json(), indent=1))
    else:
        tables.print_diagnosis(diagnosis)
    if diagnosis.refused is not None:
        raise typer.Exit(complain(f"no store opens by {target!r}: {diagnosis.refused}"))


def tune(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory on the mount.")],
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="How long to measure, such as 30s or 5m.")
    ] = "30s",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Write at most this much in all.")
    ] = "16GiB",
    io_threads: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Blocks at once to measure beside 1; default: as stores use."
        ),
    ] = None,
    writes: Annotated[
        Writes,
        typer.Option(
            help="Time writes until other processes see the block, or until it would survive a "
            "power loss."
        ),
    ] = Writes.VISIBLE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Measure, but leave no calibration file.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the calibration that stands; measure nothing.")
    ] = False,
) -> None:
    """Measure the fastest I/O modes of a mount.

    Finds out when bypassing the page cache pays, for the hybrid backend: writes and cold
    reads of 4 KiB to 64 MiB are timed, one at a time and many at once, in every I/O mode the
    medium has, by turns. The result is a small file in PATH that hybrid stores opened there
    go by; where nothing could be decided it is not written, and the exit status is 2.
    Blocks are written to a private directory that is removed again, also on Ctrl-C.
    """
    if show:
        tables.print_tuning(tuning.load(path))
        return
    result = _measure(path, parse_duration(budget), max_bytes, io_threads, writes.value)
    tables.print_tuning(result)
    if not result.decides:
        complain(
            f"not written: no size had {tuning.MIN_ROUNDS} rounds within --budget {budget} and "
            f"--max-bytes {max_bytes}, so nothing was decided; allow more"
        )
        raise typer.Exit(FAILED)
    if dry_run:
        print_line("\nnot written (--dry-run)")
    else:
        print_line(f"\nwritten to {tuning.save(path, result)}")


def _measure(
    path: str, budget_s: float, max_bytes: str, io_threads: int | None, writes: Durability
) -> tuning.Tuning:
    with progress_bar(TimeElapsedColumn()) as bar:
        task = bar.add_task("measuring", total=1.0)

        def report(share: float, what: str) -> None:
            bar.update(task, completed=share, description=what)

        return tuning.tune(
            path,
            budget_s=budget_s,
            max_bytes=max_bytes,
            io_threads=io_threads,
            writes=writes,
            report=report,
        )


COMMANDS: Final = (
    (
        "doctor",
        doctor,
        "  kvio doctor /mnt/kv\n"
        "  kvio doctor 'hybrid:///mnt/kv?durability=durable'\n"
        "  kvio doctor /mnt/kv --json",
    ),
    (
        "tune",
        tune,
        "  kvio tune /mnt/kv\n"
        "  kvio tune /mnt/kv --budget 2m --writes durable\n"
        "  kvio tune /mnt/kv --dry-run\n"
        "  kvio tune /mnt/kv --show",
    ),
)
