"""Compares the POSIX backends with each other and with plain Python on this machine.

Blocks have the KV-cache shapes of real models. Run it by ``python -m kvio.experiments.backends``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvio import ConfigError, GiB, KvioError, MiB
from kvio.experiments.comparison import Comparison, Plan
from kvio.experiments.contenders import PLAIN, entries
from kvio.experiments.machine import FileSystem, describe_file_system, describe_machine
from kvio.experiments.measure import COLD, HOT, WRITE, Summary, summarise
from kvio.experiments.record import Record, present
from kvio.experiments.run import Run, workplace
from kvio.experiments.shapes import SHAPES, TOKENS_PER_BLOCK
from kvio.experiments.table import Table
from kvio.url import parse_size

BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
#: From the smallest to the largest block.
DEFAULT_MODELS: Final = ("gpt-oss-120b", "Llama-3.1-8B", "Llama-3.1-70B")
_HEADINGS: Final = (
    "model", "block", "contender", "checksum", "MB/s", "range", "calls", "p50 ms", "p99 ms",
    "x plain", "mode", "because",
)  # fmt: skip
_RIGHT: Final = frozenset({"MB/s", "range", "calls", "p50 ms", "p99 ms", "x plain"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, print its tables and write them down.

    Returns:
        0; 1 if a byte differed; 2 for a mistake in the arguments; 130 after Ctrl-C, which keeps
        what was measured until then.
    """
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (KvioError, OSError) as exc:
        sys.stderr.write(f"kvio.experiments.backends: {exc}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvio.experiments.backends", description=__doc__
    )
    add = parser.add_argument
    add("--root", type=Path, help="directory to measure in (default: the current directory)")
    add("--results", type=Path, help="folder for JSON, Markdown and PNG (default: results/...)")
    add("--models", default=",".join(DEFAULT_MODELS), help="names separated by commas, or 'all'")
    add("--backends", default=",".join(BACKENDS), help="names separated by commas")
    add("--tokens", type=int, default=TOKENS_PER_BLOCK, help="tokens a block (default 256)")
    add("--checksum", choices=("on", "off", "both"), default="both", help="of kvio's blocks")
    add("--durability", choices=("visible", "durable"), default="visible")
    add("--threads", type=int, default=1, help="callers at the same time (default 1)")
    add("--max-bytes", type=_size, default=160 * MiB, help="a turn writes (default 160MiB)")
    add("--budget", type=float, default=60.0, help="seconds after which no round begins (60)")
    add("--rounds", type=int, default=15, help="rounds at most (default 15)")
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _run(arguments: argparse.Namespace) -> int:
    root = arguments.root or Path.cwd()
    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such directory")
    file_system = describe_file_system(root)
    if file_system.is_memory:
        sys.stderr.write(f"warning: {root} is on {file_system.kind}: this measures memory\n")
    run = Run(arguments.budget, arguments.rounds)
    with workplace(root) as base:
        comparison = Comparison(_plan(arguments, base, file_system))
        comparison.run(run)
    if not run.samples:
        sys.stderr.write("nothing was measured\n")
        return run.status()
    record = _make_record(arguments, comparison.plan, run, file_system)
    present(record, _tables(record.summaries), arguments.results)
    if any(sample.intact is False for sample in run.samples):
        sys.stderr.write("BYTES DIFFER: see the notes above\n")
    return run.status()


def _plan(arguments: argparse.Namespace, base: Path, file_system: FileSystem) -> Plan:
    for name in ("tokens", "threads", "rounds", "max_bytes"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    backends = arguments.backends.split(",")
    names = list(SHAPES) if arguments.models == "all" else arguments.models.split(",")
    for kind, wanted, known in (("model", names, SHAPES), ("backend", backends, BACKENDS)):
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise ConfigError(f"unknown {kind} {unknown[0]!r}; known: {', '.join(known)}")
    plan = Plan(
        base=base,
        shapes=[SHAPES[name] for name in names],
        entries=entries(backends, arguments.checksum),
        tokens=arguments.tokens,
        max_bytes=arguments.max_bytes,
        threads=arguments.threads,
        durability=arguments.durability,
    )
    needed = 2 * plan.arena_nbytes()
    if file_system.free_bytes < needed:
        raise ConfigError(f"{file_system.path}: less than {needed / GiB:.1f} GiB are free")
    return plan


def _make_record(
    arguments: argparse.Namespace, plan: Plan, run: Run, file_system: FileSystem
) -> Record:
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    shapes = [asdict(shape) for shape in plan.shapes]
    summaries = summarise(run.samples, PLAIN, [entry.name for entry in plan.entries])
    return Record(
        experiment="backends",
        title=f"POSIX backends: KV blocks of {plan.tokens} tokens, {plan.durability}",
        machine=describe_machine(),
        file_system=file_system,
        options={**options, "shapes": shapes},
        notes=_notes(plan, summaries, file_system) + run.notes(),
        samples=run.samples,
        summaries=summaries,
    )


def _notes(plan: Plan, summaries: Sequence[Summary], file_system: FileSystem) -> list[str]:
    notes = [
        f"one block a call, {plan.threads} caller{'s' * (plan.threads > 1)}, source and target "
        "memory page-aligned; synchronised and compared byte for byte outside what is timed",
        "plain Python: open, write, os.replace and open, readinto; no checksum, no key, no "
        "exclusive create. kvio 'no checksum': trailer only",
        "p99 by nearest rank: the slowest call where there were fewer than 100",
    ]
    for operation, state in ((HOT, "hot"), (COLD, "cold")):
        cached = [s.cached_before for s in summaries if s.operation == operation]
        known = [fraction for fraction in cached if fraction is not None]
        told = f"{min(known):.0%} to {max(known):.0%}" if known else "unknown"
        notes.append(f"page cache before {state} reads: {told} of the bytes")
        if state == "cold" and known and max(known) > 0.01:
            notes.append("NOT COMPARABLE: the page cache could not be emptied; 'cold' is not cold")
    if file_system.is_memory:
        notes.append(f"NOT COMPARABLE: {file_system.kind} is memory; nothing reached a disk")
    return notes


def _tables(summaries: Sequence[Summary]) -> list[Table]:
    return [
        _table(operation, own)
        for operation in (WRITE, HOT, COLD)
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _table(operation: str, summaries: Sequence[Summary]) -> Table:
    order = sorted(summaries, key=lambda s: s.block_nbytes)
    ends = [
        index
        for index, (this, following) in enumerate(pairwise(order))
        if this.subject != following.subject
    ]
    because = operation == WRITE  # reads have no receipt to say it
    return Table(
        title=operation,
        headings=_HEADINGS if because else _HEADINGS[:-1],
        rows=[_row(summary)[: None if because else -1] for summary in order],
        right=_RIGHT,
        rule_after=frozenset(ends),
    )


def _row(summary: Summary) -> tuple[str, ...]:
    speeds = (summary.slowest_bytes_per_s, summary.fastest_bytes_per_s)
    modes = ", ".join(
        mode if len(summary.modes) == 1 else f"{mode} {count}/{summary.calls}"
        for mode, count in summary.modes.items()
    )
    return (
        summary.subject,
        f"{summary.block_nbytes / MiB:.4g} MiB",
        summary.contender,
        "on" if summary.checksum else "off",
        f"{summary.bytes_per_s / 1e6:.0f}",
        "-".join(f"{speed / 1e6:.0f}" for speed in speeds),
        str(summary.calls),
        f"{summary.p50_s * 1e3:.2f}",
        f"{summary.p99_s * 1e3:.2f}",
        "" if summary.ratio is None else f"{summary.ratio:.2f}",
        modes or "not reported",
        "; ".join(summary.reasons),
    )


if __name__ == "__main__":
    sys.exit(main())
