"""Print the tables of doctor and tune."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TimeElapsedColumn
from rich.table import Table

from kvio.cli.output import FAILED, complain, format_bytes, parse_duration, print_line, progress_bar
from kvio.diagnostics import doctor as doctors
from kvio.diagnostics import tuning
from kvio.diagnostics.doctor import Diagnosis
from kvio.filesystem.io_mode import Calibration, Step

_ANSWER_COLUMNS: Final = 22
_MODES: Final = ("buffered", "direct", "dontcache")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the findings as a table, then the recommendation."""
    console = Console(highlight=False)
    table = _table(f"What kvio found at {diagnosis.target}")
    table.add_column("question", no_wrap=True)
    table.add_column("answer", max_width=_ANSWER_COLUMNS, overflow="fold")
    table.add_column("meaning")
    for finding in diagnosis.findings:
        style = {True: "green", False: "yellow", None: ""}[finding.good]
        answer = escape(finding.answer)
        table.add_row(
            finding.name, f"[{style}]{answer}[/]" if style else answer, escape(finding.meaning)
        )
    console.print(table)
    console.print()
    if diagnosis.url is not None:
        console.print(f"Recommended: [bold]{escape(diagnosis.url)}[/]", soft_wrap=True)
    for sentence in diagnosis.advice:
        console.print(f"- {escape(sentence)}")


def print_tuning(result: tuning.Tuning) -> None:
    """Print the medians per size and mode, then the chosen thresholds."""
    console = Console(highlight=False)
    measured = result.measured
    cells = measured.get("cells", ())
    writes = measured.get("writes", "visible")
    for concurrency in sorted({cell["concurrency"] for cell in cells}):
        row = sorted(
            (cell for cell in cells if cell["concurrency"] == concurrency),
            key=lambda cell: int(cell["nbytes"]),
        )
        many = _many(concurrency)
        for table in (
            _writes_table(f"Writes, {many}, MB/s until {writes}", row, result),
            _reads_table(f"Cold reads, {many}, MB/s", row, result),
        ):
            console.print(table)
            console.print()
    if cells:
        for note in _notes(measured, cells):
            console.print(escape(note))
        console.print()
    _print_thresholds(console, result.calibration)


def _writes_table(title: str, row: Sequence[dict[str, Any]], result: tuning.Tuning) -> Table:
    table = _rates_table(title, row, "write_mb_per_s")
    visible = result.measured.get("writes") == "visible"
    if visible:
        table.add_column("left dirty", justify="right")
    chosen = result.calibration.pick
    for cell in row:
        mode = chosen(result.calibration.write, cell["nbytes"], cell["concurrency"])
        table.add_row(
            *_rates(cell, "write_mb_per_s", row, mode), *([_left_dirty(cell)] if visible else [])
        )
    return table


def _reads_table(title: str, row: Sequence[dict[str, Any]], result: tuning.Tuning) -> Table:
    table = _rates_table(title, row, "read_mb_per_s")
    chosen = result.calibration.pick
    for cell in row:
        mode = chosen(result.calibration.read, cell["nbytes"], cell["concurrency"])
        table.add_row(*_rates(cell, "read_mb_per_s", row, mode))
    return table


def _rates_table(title: str, row: Sequence[dict[str, Any]], name: str) -> Table:
    table = _table(title)
    table.add_column("size", justify="right", no_wrap=True)
    for mode in _modes_of(row, name):
        table.add_column(mode, justify="right")
    table.add_column("chosen")
    table.add_column("rounds", justify="right")
    return table


def _rates(
    cell: Mapping[str, Any], name: str, row: Sequence[dict[str, Any]], chosen: str
) -> Iterable[str]:
    rates = cell[name]
    yield format_bytes(cell["nbytes"])
    for mode in _modes_of(row, name):
        rate = f"{rates[mode]:.0f}" if mode in rates else "-"
        yield f"[bold]{rate}[/]" if rate != "-" and rates[mode] == max(rates.values()) else rate
    yield chosen if cell["rounds"] >= tuning.MIN_ROUNDS else f"{chosen}*"
    yield str(cell["rounds"])


def _modes_of(row: Sequence[dict[str, Any]], name: str) -> list[str]:
    return [mode for mode in _MODES if any(mode in cell[name] for cell in row)]


def _left_dirty(cell: Mapping[str, Any]) -> str:
    """Return the dirty bytes of a buffered block after its write, and the writeback time."""
    settle_s = cell["settle_s"].get("buffered")
    dirty = cell["dirty_bytes"].get("buffered")
    if settle_s is None:
        return "-"
    size = "unknown" if dirty is None else format_bytes(dirty / cell["nblocks"])
    return f"{size}, {settle_s * 1e3:.2g} ms"


def _notes(measured: Mapping[str, Any], cells: Sequence[dict[str, Any]]) -> Iterable[str]:
    few, most = (limit(cell["rounds"] for cell in cells) for limit in (min, max))
    yield (
        f"Medians of {few} to {most} rounds on {measured.get('file_system')}, "
        f"{measured.get('system')}: {measured.get('seconds')} s, "
        f"{format_bytes(measured.get('bytes_written', 0))} written."
    )
    if measured.get("writes") == "visible":
        yield (
            "A visible write may end before its bytes are on the disk: left dirty is how much of "
            "a block a buffered write had not written back, and how long the writeback took then."
        )
    if not measured.get("cold_reads", True):
        yield "The page cache cannot be dropped here: reads are not cold, so the default is kept."
    if few < tuning.MIN_ROUNDS:
        yield "* too few rounds within the limits to decide: the default is kept."


def _print_thresholds(console: Console, calibration: Calibration) -> None:
    chosen = _table(f"Chosen ({escape(calibration.reason)})")
    chosen.show_header = False
    chosen.add_column(no_wrap=True)
    chosen.add_column()
    for verb, table in (("writes", calibration.write), ("cold reads", calibration.read)):
        for concurrency, steps in sorted(table.items()):
            chosen.add_row(f"{verb}, {_many(concurrency)}", _in_words(steps))
    console.print(chosen)


def _in_words(steps: Sequence[Step]) -> str:
    *limited, last = steps
    words = [f"{step.mode} below {format_bytes(step.below_nbytes or 0)}" for step in limited]
    return ", ".join([*words, f"{last.mode} above" if words else f"always {last.mode}"])


def _many(concurrency: int) -> str:
    return "one at a time" if concurrency == 1 else f"{concurrency} at once"


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
    )


# --------------------------------------------------------------------------------------------------
# Implement doctor (test storage) and tune (measure the fastest I/O modes).


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
        print_diagnosis(diagnosis)
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
        print_tuning(tuning.load(path))
        return
    result = _measure(path, parse_duration(budget), max_bytes, io_threads, writes.value)
    print_tuning(result)
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
