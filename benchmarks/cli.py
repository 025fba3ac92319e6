"""The command line of ``python -m benchmarks``: a command a scenario, and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks import dlio_options, mlperf_kv_options, s3_options
from benchmarks.harness import report as reports
from benchmarks.harness.run import Limits
from benchmarks.options import Budget, Loop, MaxBytes, Names, Results, Root, Rounds
from kvio import ConfigError
from kvio.cli.output import guarded, parse_duration, print_line
from kvio.url import parse_size

app = typer.Typer(
    name="benchmarks",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _benchmarks(context: typer.Context) -> None:
    """Compare kvio with other ways to do the same I/O on this machine.

    Contenders run in alternation and every byte is verified. Writes JSON with every sample,
    tables, verdicts and a plot to a folder. Ctrl-C and SIGTERM keep the results so far.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def backends(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "60s",
    max_bytes: MaxBytes = "160MiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    models: Annotated[
        str, typer.Option(metavar="MODEL,...", help="Models whose KV-block sizes to use, or all.")
    ] = "gpt-oss-120b,Llama-3.1-8B,Llama-3.1-70B",
    backends: Annotated[
        str, typer.Option(metavar="NAME,...", help="posix-tmpfile, posix-direct, hybrid.")
    ] = "posix-tmpfile,posix-direct,hybrid",
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per block.")] = 256,
    checksum: Annotated[
        str, typer.Option(metavar="on|off|both", help="Checksum kvio's blocks (CRC32C).")
    ] = "both",
    durability: Annotated[str, typer.Option(metavar="visible|durable")] = "visible",
    threads: Annotated[int, typer.Option(metavar="N", help="Concurrent callers.")] = 1,
) -> None:
    """Compare the POSIX backends with plain Python, with the KV-block sizes of real models."""
    from benchmarks.harness.shapes import SHAPES
    from benchmarks.scenarios import backends as this

    status = this.run(
        _limits(root, results, budget, max_bytes, rounds, loop),
        models=list(SHAPES) if models == "all" else _names(models) or (),
        backends=_names(backends) or (),
        tokens=tokens,
        checksum=checksum,
        durability=durability,  # type: ignore[arg-type]  # run checks it
        threads=threads,
    )
    _exit(status)


def tmpfile(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "60s",
    max_bytes: MaxBytes = "160MiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    threads: Annotated[
        str, typer.Option(metavar="N,...", help="Numbers of concurrent writers.")
    ] = "1,4,16,64",
    file_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="File size; default: 50MiB, or less to fit the limits."),
    ] = None,
    syncs: Annotated[str, typer.Option(metavar="SYNC,...", help="none, durable.")] = "none,durable",
    contenders: Annotated[
        str | None, typer.Option(metavar="NAME;...", help="Contenders; default: all.")
    ] = None,
) -> None:
    """Publish a file: with streams, stdio or write(2) and rename or linkat, and with kvio.

    Baselines are compiled from benchmarks/baselines, if there is a C++ compiler.
    """
    from benchmarks.scenarios import tmpfile as this

    status = this.run(
        _limits(root, results, budget, max_bytes, rounds, loop),
        threads=_counts("--threads", threads),
        file_bytes=None if file_bytes is None else parse_size(file_bytes),
        syncs=_names(syncs) or (),
        contenders=_names(contenders, separator=";"),
    )
    _exit(status)


def calls(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "3m",
    max_bytes: MaxBytes = "64MiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    parts: Annotated[
        str,
        typer.Option(metavar="PART,...", help="one call, batch, direct, durable, drain, process."),
    ] = "one call,batch,direct,durable,drain,process",
) -> None:
    """Compare single calls and batches with C loops that make the system calls alone, and fio.

    Needs a C compiler ($CC) and, for direct I/O, fio; what is missing is left out by name.
    """
    from benchmarks.scenarios import calls as this

    limits = _limits(root, results, budget, max_bytes, rounds, loop)
    _exit(this.run(limits, parts=_names(parts) or ()))


def hybrid(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "60s",
    max_bytes: MaxBytes = "64MiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...", help="Block sizes; default: 4KiB to 64MiB in steps of four."
        ),
    ] = None,
    contenders: Names = None,
) -> None:
    """Measure bandwidth by I/O size: buffered, dontcache, direct, unaligned and hybrid."""
    from benchmarks.scenarios import hybrid as this

    wanted = this.SIZES if sizes is None else [parse_size(one) for one in sizes.split(",")]
    limits = _limits(root, results, budget, max_bytes, rounds, loop)
    _exit(this.run(limits, sizes=wanted, contenders=_names(contenders)))


def offload(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "60s",
    max_bytes: MaxBytes = "512MiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    models: Annotated[
        str, typer.Option(metavar="MODEL,...", help="Models whose KV-block sizes to use, or all.")
    ] = "gpt-oss-120b,Llama-3.1-8B",
    requests: Annotated[int, typer.Option(metavar="N", help="Maximum number of requests.")] = 300,
    request_tokens: Annotated[
        int, typer.Option(metavar="N", help="Maximum of tokens per request.")
    ] = 12_000,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per block.")] = 256,
    shared: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of a prompt that is a common prefix.")
    ] = 0.5,
    fresh: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of a replayed prompt that is new.")
    ] = 0.25,
    threads: Annotated[int, typer.Option(metavar="N", help="Concurrent requests.")] = 4,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="Requests per second; default: no pause.")
    ] = None,
    durable: Annotated[bool, typer.Option("--durable", help="Wait for the disk.")] = False,
    contenders: Names = None,
) -> None:
    """Simulate KV-cache offload: look up the prefix, load the hits, store the misses.

    Requests and their bytes are reduced to --max-bytes; the result is printed.
    """
    from benchmarks.harness.shapes import SHAPES
    from benchmarks.scenarios.kv_offload import scenario as this

    status = this.run(
        _limits(root, results, budget, max_bytes, rounds, loop),
        models=list(SHAPES) if models == "all" else _names(models) or (),
        tokens=tokens,
        requests=requests,
        request_tokens=request_tokens,
        shared=shared,
        fresh=fresh,
        threads=threads,
        rate=rate,
        durability="durable" if durable else "visible",
        contenders=_names(contenders),
    )
    _exit(status)


def staging(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "3m",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Checkpoint of all ranks; it fits their tiers.")
    ] = "128MiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Concurrent processes; default: 1,8,16."),
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,...", help="Block sizes, multiples of 4 KiB.")
    ] = "1MiB,8MiB",
    drain_threads: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Writer threads of each tier and of its baselines."),
    ] = 2,
    checksum: Annotated[bool, typer.Option(help="Checksum kvio's blocks (CRC32C).")] = True,
    contenders: Names = None,
) -> None:
    """Write checkpoints of many ranks to the staging tier, the page cache, the disk; memcpy.

    Under mpirun (with mpi4py, all ranks on one machine) the ranks are the processes. Exit status 1:
    a byte differed, or a rank died.
    """
    from benchmarks.scenarios.staging import scenario as this

    status = this.run(
        _limits(root, results, budget, max_bytes, rounds, loop),
        ranks=None if ranks is None else _counts("--ranks", ranks),
        sizes=[parse_size(one) for one in sizes.split(",")],
        contenders=_names(contenders),
        drain_threads=drain_threads,
        checksum=checksum,
    )
    _exit(status)


def shared_file(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "3m",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum of bytes that one trial writes in all.")
    ] = "256MiB",
    rounds: Rounds = 5,
    loop: Loop = None,
    writers: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Concurrent writers; default: 1,2,4,8,16."),
    ] = None,
    shapes: Annotated[
        str,
        typer.Option(
            metavar="SHAPE,...",
            help="ior: 8 segments of 32 MiB, 1 MiB per call; custom: 512 MiB, 4 MiB per call.",
        ),
    ] = "ior,custom",
    kinds: Annotated[
        str, typer.Option("--as", metavar="KIND,...", help="processes, threads.")
    ] = "processes,threads",
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="MAP_BY/ORDER,...",
            help="core, l3, numa or socket / pack or spread; none. Default: by topology.",
        ),
    ] = None,
    contenders: Annotated[
        str | None, typer.Option(metavar="NAME;...", help="Contenders; default: all.")
    ] = None,
) -> None:
    """Write one file with many writers: kvio.SharedFile, separate files, os.pwrite, C and IOR.

    Shapes are scaled down to --max-bytes. Under mpirun (with mpi4py, all ranks on one machine) the
    ranks are the processes. Exit status 1: a byte differed, or a process died.
    """
    from benchmarks.scenarios.shared_file import scenario as this

    status = this.run(
        _limits(root, results, budget, max_bytes, rounds, loop),
        writers=None if writers is None else _counts("--writers", writers),
        shapes=_names(shapes) or (),
        kinds=_names(kinds) or (),
        placements=_names(placement),
        contenders=_names(contenders, separator=";"),
    )
    _exit(status)


def checkpoint(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "5m",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the state that is saved.")
    ] = "256MiB",
    rounds: Rounds = 15,
    loop: Loop = None,
    tensors: Annotated[
        str, typer.Option(metavar="N,...", help="Numbers of tensors of a state.")
    ] = "100,5000",
    contenders: Names = None,
) -> None:
    """Save and load with torch.distributed.checkpoint: KvioWriter and FileSystemWriter.

    Needs torch. Exit status 1: a byte differed.
    """
    from benchmarks.scenarios import checkpoint as this

    status = this.run(
        _limits(root, results, budget, max_bytes, rounds, loop),
        tensors=_counts("--tensors", tensors),
        contenders=_names(contenders) or this.CONTENDERS,
    )
    _exit(status)


def s3_network(
    results: Results = None,
    budget: Budget = "2m",
    rounds: Rounds = 15,
    round_trip_ms: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Time of a request and of a new connection.")
    ] = 20.0,
    connection_mib_s: Annotated[
        float, typer.Option(min=0, metavar="MIB/S", help="Rate of each connection; 0: no limit.")
    ] = 20.0,
    objects: Annotated[int, typer.Option(metavar="N", help="Objects of 64 KiB in a batch.")] = 400,
    large: Annotated[
        str, typer.Option(metavar="SIZE", help="Length of the large object; 0: none.")
    ] = "128MiB",
    contenders: Names = None,
) -> None:
    """Compare batches and a large object over a simulated network, kvio and the libraries' ways.

    The server is benchmarks/s3mem, which waits as long as a network would take. Exit status 1: a
    byte differed.
    """
    from benchmarks.scenarios import s3_network as this

    status = this.run(
        _limits(Path(), results, budget, "1", rounds),
        contenders=_names(contenders) or this.CONTENDERS,
        objects=objects,
        large_bytes=parse_size(large),
        round_trip_ms=round_trip_ms,
        connection_mib_s=connection_mib_s,
    )
    _exit(status)


def media(
    root: Root = Path(),
    results: Results = None,
    budget: Budget = "60s",
    max_bytes: MaxBytes = "320MiB",
    rounds: Rounds = 15,
    kinds: Annotated[
        str | None,
        typer.Option(metavar="KIND,...", help="ext4, xfs, btrfs, tmpfs, overlay, fuse."),
    ] = None,
) -> None:
    """Run doctor and tune on freshly created file systems.

    Needs root. The file systems are in image files below PATH and are removed afterwards.
    """
    from benchmarks.scenarios import media as this

    limits = _limits(root, results, budget, max_bytes, rounds)
    wanted = _names(kinds)
    _exit(this.run(limits) if wanted is None else this.run(limits, kinds=wanted))


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Results of benchmarks.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="Later results, for a comparison.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Output; default: FOLDER/report.html."),
    ] = None,
    allow_different: Annotated[
        bool,
        typer.Option(
            "--allow-different", help="Compare runs of unlike machines, file systems or options."
        ),
    ] = False,
) -> None:
    """Combine results in one HTML page, and compare two folders.

    The plots are inline. With OTHER, the page compares what both folders measured, the largest
    slowdown first.
    """
    before = reports.load(folder)
    after = [] if other is None else reports.load(other)
    comparison = None
    if other:
        comparison = reports.compare(before, after, allow_different=allow_different)
        for line in reports.versions(before, after):
            print_line(line)
        comparison.show()
    target = out or folder / "report.html"
    target.write_text(reports.page([*before, *after], comparison), encoding="utf-8")
    print_line(f"{len(before) + len(after)} runs in {target}")


def _limits(
    root: Path,
    results: Path | None,
    budget: str,
    max_bytes: str,
    rounds: int,
    loop: str | None = None,
) -> Limits:
    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such directory")
    nbytes = parse_size(max_bytes)
    if nbytes < 1:
        raise ConfigError("--max-bytes must be at least 1")
    if loop not in (None, "ext4", "xfs"):
        raise ConfigError(f"--loop {loop}: must be ext4 or xfs")
    return Limits(
        root=root.resolve(),
        results=results,
        budget_s=parse_duration(budget),
        max_bytes=nbytes,
        max_rounds=rounds,
        loop=loop,
    )


def _counts(option: str, text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text}: must be numbers separated by commas") from None


def _names(text: str | None, *, separator: str = ",") -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(separator)]


def _exit(status: int) -> None:
    if status:
        raise typer.Exit(status)


_COMMANDS: Final = (
    (
        "backends",
        backends,
        "  backends --root /mnt/kv\n"
        "  backends --models all --backends hybrid --checksum on --durability durable",
    ),
    (
        "tmpfile",
        tmpfile,
        "  tmpfile --root /mnt/kv\n"
        "  tmpfile --root /mnt/kv --threads 1,64 --max-bytes 4GiB --budget 10m\n"
        "  tmpfile --contenders 'write 1 MiB, rename; posix-tmpfile'",
    ),
    (
        "calls",
        calls,
        "  calls --root /mnt/kv\n  calls --root /mnt/kv --parts 'one call,batch' --loop ext4",
    ),
    (
        "hybrid",
        hybrid,
        "  hybrid --root /mnt/kv\n  hybrid --root /mnt/kv --sizes 64KiB,1MiB,16MiB --budget 5m",
    ),
    (
        "kv-offload",
        offload,
        "  kv-offload --root /mnt/kv\n"
        "  kv-offload --models all --threads 64 --max-bytes 8GiB --budget 10m",
    ),
    (
        "staging",
        staging,
        "  staging --root /mnt/kv\n"
        "  staging --root /mnt/kv --ranks 8,16 --sizes 64MiB --max-bytes 2GiB\n"
        "  staging --contenders 'memcpy,tier direct,posix-direct' --budget 30s\n"
        "  mpirun -n 16 python -m benchmarks staging --root /mnt/kv",
    ),
    (
        "shared-file",
        shared_file,
        "  shared-file --root /mnt/kv\n"
        "  shared-file --root /mnt/kv --writers 4 --max-bytes 1GiB --as processes\n"
        "  shared-file --placement core/pack,core/spread,socket/spread\n"
        "  shared-file --contenders 'shared direct; files direct; C direct'\n"
        "  mpirun -n 16 python -m benchmarks shared-file --root /mnt/kv --as processes",
    ),
    (
        "checkpoint",
        checkpoint,
        "  checkpoint --root /var/tmp --loop ext4 --max-bytes 1GiB\n"
        "  checkpoint --tensors 100,20000 --contenders FileSystemWriter,hybrid",
    ),
    (
        "media",
        media,
        "  media --root /var/tmp\n  media --root /var/tmp --kinds ext4,xfs --budget 5m",
    ),
    ("s3", s3_options.s3, s3_options.EXAMPLES),
    (
        "s3-network",
        s3_network,
        "  s3-network\n"
        "  s3-network --round-trip-ms 60 --connection-mib-s 0 --objects 2000 --budget 5m\n"
        "  s3-network --contenders 'kvio obstore,obstore async' --large 0",
    ),
    ("dlio", dlio_options.dlio, dlio_options.EXAMPLES),
    ("mlperf_kv", mlperf_kv_options.mlperf_kv, mlperf_kv_options.EXAMPLES),
    (
        "report",
        report,
        "  report results/hybrid-20260101-120000-1\n  report before after --out comparison.html",
    ),
)
for _name, _command, _examples in _COMMANDS:
    app.command(_name, epilog=f"\b\nExamples, after python -m benchmarks:\n{_examples}")(
        guarded(_command)
    )
