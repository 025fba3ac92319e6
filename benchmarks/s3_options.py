"""Define the command line of scenario s3."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.harness.run import Limits
from kvio import ConfigError
from kvio.cli.output import parse_duration

EXAMPLES: Final = (
    "  s3\n"
    "  s3 --contenders obstore,boto3 --parts 2,get --objects 1000\n"
    "  s3 --endpoint https://s3.example.org --bucket scratch --budget 10m\n"
    "  s3 --server minio=/usr/local/bin/minio\n"
    "  s3 --via dlio --contenders obstore,boto3\n"
    "  s3 --merge results/s3/boto3 results/s3/minio"
)
#: Default --budget by --via: DLIO takes seconds to start.
_BUDGETS: Final = {"direct": "100s", "dlio": "5m"}


def s3(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER...", help="With --merge: the runs to combine."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Combine runs instead of measuring.")
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Output of JSON, Markdown and PNG."),
    ] = None,
    via: Annotated[
        str, typer.Option(metavar="direct|dlio", help="Write with kvio's own loop, or with DLIO.")
    ] = "direct",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start no round that would end later; contenders that do not fit are named. "
            "Default: 100s, via DLIO 5m.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of rounds.")] = 15,
    objects: Annotated[
        int, typer.Option(metavar="N", help="Objects of 322,957 bytes per load.")
    ] = 400,
    parts: Annotated[
        str,
        typer.Option(
            metavar="PART,...",
            help="1: threads, 2: libraries, 3: processes, 4: sizes, get: also GET, HEAD and LIST.",
        ),
    ] = "1,2,3,4,get",
    contenders: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Libraries, or single variants: 'boto3 direct'."),
    ] = None,
    payload: Annotated[str, typer.Option(metavar="KIND", help="random, jpeg.")] = "random",
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A running server; credentials come from the AWS environment variables.",
        ),
    ] = None,
    bucket: Annotated[
        str | None, typer.Option(metavar="NAME", help="Existing bucket on that server.")
    ] = None,
    prefix: Annotated[
        str, typer.Option(metavar="NAME", help="Prefix of all objects; they are removed.")
    ] = "kvio-experiment",
    server: Annotated[
        str | None,
        typer.Option(metavar="minio=PATH", help="Also measure on this server."),
    ] = None,
) -> None:
    """Compare five S3 libraries: through kvio, tuned by hand, with defaults; and a raw client.

    Without --endpoint the server is benchmarks/s3mem. Under mpirun (with mpi4py, all
    ranks on one machine) the ranks run the processes of part 3. With --via dlio the installed
    dlio_benchmark generates the objects of parts 1 to 4, with mpirun if there are several
    processes; the same loads are also run without DLIO.
    """
    if via not in _BUDGETS:
        raise ConfigError(f"--via {via}: must be {' or '.join(_BUDGETS)}")
    if merge and via != "direct":
        raise ConfigError("--merge only combines runs without DLIO")
    if merge:
        from benchmarks.scenarios.s3.scenario import merge as merged

        if not folders:
            raise ConfigError("--merge needs the folders of runs")
        _exit(merged(folders, results))
        return
    if folders:
        raise ConfigError(f"{folders[0]}: folders need --merge")
    name, _, path = (server or "").partition("=")
    if server is not None and (name != "minio" or not path):
        raise ConfigError(f"--server {server}: must be minio=PATH")
    limits = Limits(
        root=Path(),
        results=results,
        budget_s=parse_duration(budget or _BUDGETS[via]),
        max_rounds=rounds,
    )
    from benchmarks.scenarios.s3 import dlio, scenario

    options = scenario.Options(
        parts=_split(parts),
        objects=objects,
        contenders=None if contenders is None else _split(contenders),
        payload=payload,
        endpoint=endpoint,
        bucket=bucket,
        prefix=prefix,
        real=Path(path) if path else None,
    )
    _exit(dlio.run(limits, options) if via == "dlio" else scenario.run(limits, options))


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _exit(status: int) -> None:
    if status:
        raise typer.Exit(status)
