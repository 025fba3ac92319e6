"""Define the command line of scenario dlio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.harness.run import Limits
from benchmarks.options import Budget, Loop, Results, Root, Rounds
from kvio import ConfigError
from kvio.cli.output import parse_duration
from kvio.url import parse_size

EXAMPLES: Final = (
    "  dlio --root /mnt/kv\n"
    "  dlio --root /mnt/kv --workloads unet3d --ranks 1,4 --max-bytes 4GiB\n"
    "  dlio --contenders 'local_fs torch,posix-direct,s3+obstore' --budget 10m"
)


def dlio(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "5m",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes that one trial generates or saves.")
    ] = "128MiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    workloads: Annotated[
        str, typer.Option(metavar="NAME,...", help="unet3d, retinanet, hdf5, checkpoint.")
    ] = "unet3d,retinanet,hdf5,checkpoint",
    ranks: Annotated[
        str, typer.Option(metavar="N,...", help="Numbers of MPI ranks, one case each.")
    ] = "1,2",
    contenders: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Backends to compare; 'local_fs torch': stock DLIO with its own loader.",
        ),
    ] = None,
    read_threads: Annotated[
        int, typer.Option(min=1, metavar="N", help="Reader threads or processes per rank.")
    ] = 2,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Epochs per trial.")] = 5,
    compute_ms: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Sleep per training step.")
    ] = 1.0,
) -> None:
    """Compare kvio's backends with stock local_fs in DLIO, by DLIO's metrics.

    Needs dlio_benchmark 2.0.0, mpirun for more than one rank, and torch for DLIO's own loader;
    contenders whose requirements are missing are named and left out.
    """
    from benchmarks.scenarios.dlio import scenario as this

    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such directory")
    if loop not in (None, "ext4", "xfs"):
        raise ConfigError(f"--loop {loop}: must be ext4 or xfs")
    status = this.run(
        Limits(
            root=root.resolve(),
            results=results,
            budget_s=parse_duration(budget),
            max_bytes=parse_size(max_bytes),
            max_rounds=rounds,
            loop=loop,
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
        raise ConfigError(f"--ranks {text}: must be numbers separated by commas") from None
