"""Implement bench (compare the backends on this machine), and say where commands went."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TimeElapsedColumn
from rich.table import Table

from kvio.cli.output import complain, format_bytes, parse_duration, print_line, progress_bar
from kvio.diagnostics import bench as benches
from kvio.url import parse_size

_MOVED: Final = {
    "experiment": "python -m benchmarks NAME",
    "report": "python -m benchmarks report FOLDER",
}


class Durability(StrEnum):
    """The level of the measured writes."""

    VISIBLE = "visible"
    DURABLE = "durable"


def bench(
    target: Annotated[
        str, typer.Argument(metavar="[PATH|URL]", help="A directory, or a store URL.")
    ] = ".",
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,...", help="Block sizes.")
    ] = "64KiB,1MiB,16MiB",
    durability: Annotated[
        Durability, typer.Option(help="Level of the backends' writes; a URL has its own.")
    ] = Durability.VISIBLE,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Start no round that would end later: 30s, 5m.")
    ] = "30s",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes per backend, block size and round.")
    ] = "64MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every round.")] = False,
) -> None:
    """Compare the backends on this machine: write, read hot (cached), read cold.

    A directory is measured with every POSIX backend, a URL with its own. All blocks are removed,
    and every byte that is read is verified.
    """
    nbytes = [parse_size(one) for one in sizes.split(",")]
    with progress_bar(TimeElapsedColumn()) as bar:
        task = bar.add_task("opening", total=1.0)
        found = benches.bench(
            target,
            sizes=nbytes,
            durability=durability.value,
            budget_s=parse_duration(budget),
            max_bytes=parse_size(max_bytes),
            report=lambda share, what: bar.update(task, completed=share, description=what),
        )
    if as_json:
        rows = [one.as_json() for one in found.measured]
        print_line(json.dumps({"measured": rows, "left_out": found.left_out}, indent=1))
        return
    _print(found, nbytes)


def _print(found: benches.Comparison, sizes: list[int]) -> None:
    console = Console(highlight=False)
    for operation in dict.fromkeys(one.operation for one in found.measured):
        own = [one for one in found.measured if one.operation == operation]
        rounds = len(own[0].bytes_per_s)
        console.print(f"{operation}, MB/s: median of {rounds} round{'s' * (rounds > 1)}")
        table = Table()
        table.add_column("store")
        for nbytes in sizes:
            table.add_column(format_bytes(nbytes), justify="right")
        for name in dict.fromkeys(one.store for one in own):
            cells = [
                f"{one.median / 1e6:,.0f}"
                for nbytes in sizes
                for one in own
                if (one.store, one.nbytes) == (name, nbytes)
            ]
            table.add_row(escape(name), *cells)
        console.print(table)
        console.print()
    for name, why in found.left_out.items():
        console.print(escape(f"left out: {name}: {why}"), soft_wrap=True)
    for sentence in benches.sentences(found.measured):
        console.print(escape(sentence), soft_wrap=True)


COMMANDS: Final = (
    (
        "bench",
        bench,
        "  kvio bench /mnt/kv\n"
        "  kvio bench /mnt/kv --durability durable --sizes 4KiB,32MiB --budget 2m\n"
        "  kvio bench 's3+boto3://bucket/prefix?endpoint_url=http://127.0.0.1:9000'",
    ),
)


def register_moved(app: typer.Typer) -> None:
    """Add hidden commands that name their successors and exit with 2."""
    for name in _MOVED:
        app.command(
            name,
            hidden=True,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_moved)


def _moved(context: typer.Context) -> None:
    name = str(context.info_name)
    raise typer.Exit(complain(f"kvio {name} is now, in a clone of kvio: {_MOVED[name]}"))
