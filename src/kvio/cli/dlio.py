"""experiment dlio: its options, on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvio import ConfigError
from kvio.cli.output import parse_duration
from kvio.experiments.run import Limits
from kvio.url import parse_size

EXAMPLES: Final = (
    "  kvio experiment dlio --root /mnt/kv\n"
    "  kvio experiment dlio --root /mnt/kv --workloads unet3d --ranks 1,4 --max-bytes 4GiB\n"
    "  kvio experiment dlio --contenders 'local_fs torch,posix-direct,s3+obstore' --budget 10m"
)


def dlio(
    root: Annotated[
        Path,
        typer.Option(metavar="PATH", help="The directory to measure in; nothing is left there."),
    ] = Path(),
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where JSON, Markdown and PNG go; default: results/..."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="No round begins after this, such as 60s or 5m.")
    ] = "5m",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="What one turn generates or saves.")
    ] = "128MiB",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds at most.")] = 15,
    workloads: Annotated[
        str, typer.Option(metavar="NAME,...", help="unet3d, retinanet, checkpoint.")
    ] = "unet3d,retinanet,checkpoint",
    ranks: Annotated[str, typer.Option(metavar="N,...", help="Of MPI, a case each.")] = "1,2",
    contenders: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Backends; 'local_fs torch': stock DLIO with its own loader.",
        ),
    ] = None,
    read_threads: Annotated[
        int, typer.Option(min=1, metavar="N", help="Readers of a rank, in threads or processes.")
    ] = 2,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Of a turn.")] = 5,
    compute_ms: Annotated[
        float, typer.Option(min=0, metavar="MS", help="What a step of training sleeps.")
    ] = 1.0,
) -> None:
    """DLIO's own metrics: kvio's backends beside stock local_fs, with the same and its own loader.

    Needs dlio_benchmark 2.0.0, for more than one rank mpirun, for DLIO's own loader torch; what
    is absent is left out by name.
    """
    from kvio.experiments.dlio import experiment as this

    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such directory")
    status = this.run(
        Limits(
            root=root.resolve(),
            results=results,
            budget_s=parse_duration(budget),
            max_bytes=parse_size(max_bytes),
            max_rounds=rounds,
        ),
        workloads=_split(workloads),
        ranks=_counts(ranks),
        contenders=None if contenders is None else _split(contenders),
        read_threads=read_threads,
        epochs=epochs,
        compute_s=compute_ms / 1e3,
    )
    if status:
        raise typer.Exit(status)


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _counts(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {text}: not numbers joined by commas") from None
