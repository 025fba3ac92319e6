"""Define the command line of scenario mlperf_kv."""

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
    "  mlperf_kv --program kv_cache_benchmark --root /mnt/kv\n"
    "  mlperf_kv --root /mnt/kv --users 16 --tokens 512,8192 --max-bytes 16GiB --budget 20m\n"
    "  mlperf_kv --root /var/tmp --loop ext4 --contenders hybrid --rounds 8"
)


def mlperf_kv(
    program: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The folder kv_cache_benchmark of github.com/mlcommons/storage; default: "
            "$KVIO_MLPERF_KV.",
        ),
    ] = None,
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "10m",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Capacity of the storage tier.")
    ] = "1GiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    contenders: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="posix-tmpfile, posix-direct, hybrid; and stock."),
    ] = None,
    users: Annotated[
        int, typer.Option(min=1, metavar="N", help="Users of the program, a thread each.")
    ] = 4,
    tokens: Annotated[
        str, typer.Option(metavar="LEAST,MOST", help="Range of a prompt; 24 KiB per token.")
    ] = "512,2048",
    duration: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="Time that the program runs in a trial.")
    ] = 10,
) -> None:
    """Run MLCommons' KV-cache benchmark on its own storage tier and on kvio's backends.

    Needs the program, numpy and pyyaml. One trace is compared byte by byte on every contender.
    """
    from benchmarks.scenarios.mlperf_kv import scenario as this

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
        program=program,
        contenders=None if contenders is None else [one.strip() for one in contenders.split(",")],
        users=users,
        tokens=_range(tokens),
        duration_s=duration,
    )
    if status:
        raise typer.Exit(status)


def _range(text: str) -> tuple[int, int]:
    try:
        low, high = (int(one) for one in text.split(","))
    except ValueError:
        raise ConfigError(f"--tokens {text}: must be two numbers, as in 512,2048") from None
    return low, high
