"""Implement doctor (test storage) and tune (measure the fastest I/O modes)."""

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
    """The level at which a measured write ends."""

    VISIBLE = "visible"
    DURABLE = "durable"


def doctor(
    target: Annotated[str, typer.Argument(metavar="PATH|URL", help="A directory, or a store URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Test what a file system or bucket supports.

    Creates and removes a few small files, and recommends a backend with its options. Exits
    with 2 if no store can be opened with the URL.
    """
    diagnosis = doctors.diagnose(target)
    if as_json:
        print_line(json.dumps(diagnosis.as_json(), indent=1))
    else:
        tables.print_diagnosis(diagnosis)
    if diagnosis.refused is not None:
        raise typer.Exit(complain(f"cannot open a store at {target!r}: {diagnosis.refused}"))


def tune(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory on the mount.")],
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="How long to measure, such as 30s or 5m.")
    ] = "30s",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum of bytes written in all.")
    ] = "16GiB",
    io_threads: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Second concurrency to measure, after 1; default: a store's."
        ),
    ] = None,
    writes: Annotated[
        Writes,
        typer.Option(
            help="Measure a write until other processes see the block, or until it would survive "
            "a power loss."
        ),
    ] = Writes.VISIBLE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Measure, but write no calibration file.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the existing calibration; measure nothing.")
    ] = False,
) -> None:
    """Measure the fastest I/O modes of a mount.

    Measures for the hybrid backend when bypassing the page cache is faster: writes and cold
    reads of 4 KiB to 64 MiB, one at a time and many at once, in alternating I/O modes. The
    result is a small file in PATH, which hybrid stores with the root PATH use. If no size could
    be decided, no file is written and the exit status is 2.
    Blocks are written to a private directory that is removed at the end, also on Ctrl-C.
    """
    if show:
        tables.print_tuning(tuning.load(path))
        return
    result = _measure(path, parse_duration(budget), max_bytes, io_threads, writes.value)
    tables.print_tuning(result)
    if not result.decides:
        complain(
            f"not written: no size had {tuning.MIN_ROUNDS} rounds within --budget {budget} and "
            f"--max-bytes {max_bytes}, so nothing was decided; raise these limits"
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
