"""The options that several benchmarks have: where, how long, and how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Root: TypeAlias = Annotated[
    Path, typer.Option(metavar="PATH", help="Directory to measure in; all files are removed.")
]
Results: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Output of JSON, Markdown and PNG; default: results/..."),
]
Budget: TypeAlias = Annotated[
    str,
    typer.Option(metavar="TIME", help="Time to measure: 60s, 5m. No trial starts later."),
]
MaxBytes: TypeAlias = Annotated[
    str, typer.Option(metavar="SIZE", help="Maximum of bytes that one trial writes.")
]
Loop: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="ext4|xfs",
        help="Measure on a fresh file system in an image file below PATH; needs root.",
    ),
]
Rounds: TypeAlias = Annotated[
    int, typer.Option(min=1, metavar="N", help="Maximum number of rounds.")
]
Names: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Contenders; default: all.")
]
