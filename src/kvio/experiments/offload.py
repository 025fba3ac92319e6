"""KV-cache offload: requests look up their prefix, load the hits and offload the misses.

After the connector test of the change proposal "Better tmp file handling" (300 requests of 12,000
tokens), but it waits for the writes, times lookup, load and offload apart, and empties the page
cache before requests come again.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from kvio import ConfigError, GiB, MiB, UnsupportedError
from kvio.experiments import page_cache
from kvio.experiments.blocks import Arena, is_same
from kvio.experiments.machine import describe_file_system, describe_machine
from kvio.experiments.measure import Sample, Summary, percentile, summarise, time_calls
from kvio.experiments.peers import CONTENDERS, PLAIN
from kvio.experiments.plot import draw_bars
from kvio.experiments.record import Record, present
from kvio.experiments.requests import Case, Request, Size, distinct_keys, predict_hits
from kvio.experiments.run import Limits, Run, fresh_directory, workplace
from kvio.experiments.serving import LOAD, LOOKUP, OFFLOAD, Offloader, Served, busy_s, serve
from kvio.experiments.shapes import SHAPES, TOKENS_PER_BLOCK
from kvio.experiments.table import Table
from kvio.types import Durability

#: Offloads are compared when requests are new, lookups and loads when they come again.
_FIRST: Final = {LOOKUP: "lookup, new requests", LOAD: "load, just offloaded", OFFLOAD: OFFLOAD}
_AGAIN: Final = {LOOKUP: LOOKUP, LOAD: LOAD, OFFLOAD: "offload, among loads"}
_ORDER: Final = (*_AGAIN.values(), *_FIRST.values())
_SEED: Final = 20260101


def run(
    limits: Limits,
    *,
    models: Sequence[str] = ("gpt-oss-120b", "Llama-3.1-8B"),
    tokens: int = TOKENS_PER_BLOCK,
    requests: int = 300,
    request_tokens: int = 12_000,
    shared: float = 0.5,
    fresh: float = 0.25,
    threads: int = 4,
    rate: float | None = None,
    durability: Durability = "visible",
    contenders: Sequence[str] | None = None,
) -> int:
    """Serve the same requests by every contender, and print, write and plot what came of it.

    Requests are cut in number and length until a turn offloads no more than ``max_bytes``.
    Memory for about three times that is taken.

    Args:
        limits: where, and how much.
        models: names of `SHAPES`.
        tokens: of one block.
        requests: that arrive, twice each.
        request_tokens: of each when it is new.
        shared: the share of it that is one of a few shared prefixes.
        fresh: tokens it has grown by when it comes again, as a share of *request_tokens*: with
            *shared* this is the mix of reads and writes.
        threads: requests served at the same time, and I/O threads of each contender.
        rate: arrivals a second; None: the next is there when a thread is free.
        durability: of what is offloaded.
        contenders: names of `CONTENDERS`; all without it.

    Returns:
        The exit status: 0; 1 if a byte differed or a block was lost; 130 after Ctrl-C.

    Raises:
        ConfigError: a name or a number cannot be, or the disk or the memory has no room.
    """
    options = {name: value for name, value in locals().items() if name != "limits"}
    names = list(CONTENDERS if contenders is None else contenders)
    _check(limits, options, names)
    wanted = Size(
        requests=requests,
        tokens=request_tokens,
        fresh_tokens=round(fresh * request_tokens),
        shared=shared,
        block_tokens=tokens,
    )
    cases = [Case(SHAPES[model], wanted, limits.max_bytes) for model in models]
    _check_room(limits, cases)
    turns = Run(limits.budget_s, limits.max_rounds)
    missing = {name: CONTENDERS[name].missing() for name in names}
    turns.left_out |= {name: why for name, why in missing.items() if why}
    with workplace(limits.root) as base:
        offload = _Offload(base, cases, threads=threads, rate=rate, durability=durability)
        turns.take_turns(cases, names, offload.turn)
    if turns.samples:
        _present(limits, options, turns, cases, wanted)
    return turns.status()


def _check(limits: Limits, options: dict[str, Any], names: Sequence[str]) -> None:
    for name in ("tokens", "requests", "request_tokens", "threads"):
        if options[name] < 1:
            raise ConfigError(f"{name} must be at least 1")
    if options["request_tokens"] < options["tokens"]:
        raise ConfigError("request_tokens must be at least the tokens of one block")
    for name in ("shared", "fresh"):
        if not 0 <= options[name] <= 1:
            raise ConfigError(f"{name} must be from 0 to 1")
    if options["rate"] is not None and not options["rate"] > 0:
        raise ConfigError("rate must be above 0")
    if options["durability"] not in ("visible", "durable"):
        raise ConfigError(f"durability must be 'visible' or 'durable', not {options['durability']}")
    for kind, wanted, known in (
        ("model", options["models"], SHAPES),
        ("contender", names, CONTENDERS),
    ):
        unknown = [name for name in wanted if name not in known]
        if unknown or not wanted:
            raise ConfigError(f"unknown {kind} {[*unknown, ''][0]!r}; known: {', '.join(known)}")
    if not limits.root.is_dir():
        raise ConfigError(f"{limits.root}: no such directory")


def _check_room(limits: Limits, cases: Sequence[Case]) -> None:
    stored = max(case.source_nbytes for case in cases)
    held = stored + max(case.target_nbytes for case in cases)
    if describe_file_system(limits.root).free_bytes < 2 * stored:
        raise ConfigError(f"{limits.root}: less than {2 * stored / GiB:.1f} GiB are free")
    if describe_machine().memory_bytes < 2 * held:
        raise ConfigError(f"the blocks take {held / GiB:.1f} GiB, over half of the memory")


class _Offload:
    """What a turn does: new requests, an empty page cache, the same requests grown."""

    def __init__(
        self,
        base: Path,
        cases: Sequence[Case],
        *,
        threads: int,
        rate: float | None,
        durability: Durability,
    ) -> None:
        self._base, self._threads, self._rate = base, threads, rate
        self._durability = durability
        self._source = Arena(max(case.source_nbytes for case in cases))
        self._target = Arena(max(case.target_nbytes for case in cases))
        self._source.fill_random(_SEED)

    def turn(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Serve all requests on a fresh directory; a sample an operation and time."""
        with fresh_directory(self._base) as root, closing(self._open(name, root)) as offloader:
            page_cache.touch_memory(
                self._base / "scratch", self._source.memory(case.source_nbytes // 3)
            )
            os.sync()
            stored: list[str] = []
            for requests, operations in ((case.first, _FIRST), (case.again, _AGAIN)):
                page_cache.drop(root)
                cached = page_cache.cached_fraction(root)
                before = offloader.modes()
                served, intact = self._serve_all(offloader, case, requests)
                taken = offloader.modes() - before
                make = partial(
                    Sample,
                    subject=case.shape.name,
                    contender=name,
                    checksum=CONTENDERS[name].checksum,
                    round=index,
                    cached_before=cached,
                )
                # With one thread, what new requests find is certain as well.
                certain = bool(stored) or self._threads == 1
                hits = predict_hits(requests, stored) if certain else None
                stored = distinct_keys(requests)
                yield _lookups(make, operations[LOOKUP], served, hits)
                yield from _moved(make, operations, case, served, intact=intact, taken=taken)

    def _open(self, name: str, root: Path) -> Offloader:
        try:
            return CONTENDERS[name].open(root, self._durability, self._threads)
        except UnsupportedError as exc:
            raise UnsupportedError(str(exc).replace(str(self._base), "…")) from exc

    def _serve_all(
        self, offloader: Offloader, case: Case, requests: Sequence[Request]
    ) -> tuple[list[Served], bool]:
        blocks = case.cut(self._source, len(case.keys))
        source = dict(zip(case.keys, blocks, strict=True))
        each = case.size.request_blocks
        targets = case.cut(self._target, each * len(requests))
        mine = [targets[each * i : each * (i + 1)] for i in range(len(requests))]
        self._target.wipe()
        zero = time.perf_counter()
        arrivals = [0.0 if self._rate is None else zero + i / self._rate for i in range(len(mine))]
        claimed: dict[str, object] = {}
        calls = [
            partial(serve, offloader, source, request, own, at, claimed)
            for request, own, at in zip(requests, mine, arrivals, strict=True)
        ]
        served = time_calls(calls, self._threads).results
        intact = all(
            is_same(source[key], copy)
            for request, own, one in zip(requests, mine, served, strict=True)
            for key, copy in zip(request.keys[: one.hits], own, strict=False)
        )
        return served, intact and all(s.whole for one in served for s in one.spans.values())


def _lookups(
    make: partial[Sample], operation: str, served: Sequence[Served], hits: list[int] | None
) -> Sample:
    """Count lookups, not bytes: ``block_nbytes`` is 1, so "bytes" a second are lookups a second."""
    found = [one.hits for one in served]
    spans = [one.spans[LOOKUP] for one in served]
    return make(
        operation=operation,
        block_nbytes=1,
        wall_s=busy_s(spans),
        latencies_s=[span.end_s - span.start_s for span in spans],
        intact=None if hits is None else found == hits,
        facts={
            "unit": "lookups",
            "request_latencies_s": [span.end_s - span.start_s for span in spans],
            "hits": found,
            "hits_predicted": hits,
            "late_s": [one.late_s for one in served],
        },
    )


def _moved(
    make: partial[Sample],
    operations: dict[str, str],
    case: Case,
    served: Sequence[Served],
    *,
    intact: bool,
    taken: Counter[str],
) -> Iterator[Sample]:
    """Sum up loads and offloads.

    Requests move different numbers of blocks, in one call each. A sample has one latency a block,
    that of the call the block was moved by: so its bytes are those that moved. The latencies of
    the calls themselves are among the facts, and the tables' percentiles are of those. The wall
    time is that in which any such call was under way, as calls of other kinds run between them.
    """
    for step in (OFFLOAD, LOAD):
        spans = [one.spans[step] for one in served if step in one.spans]
        if not spans:
            continue
        modes = sum((span.modes for span in spans), Counter[str]())
        if step == OFFLOAD:
            taken = taken - modes  # what is left was taken by the loads
        yield make(
            operation=operations[step],
            block_nbytes=case.block_nbytes,
            wall_s=busy_s(spans),
            latencies_s=[span.end_s - span.start_s for span in spans for _ in range(span.blocks)],
            modes=dict(modes if step == OFFLOAD else taken),
            intact=intact if step == LOAD else None,
            facts={
                "request_latencies_s": [span.end_s - span.start_s for span in spans],
                "request_blocks": [span.blocks for span in spans],
            },
        )


def _present(
    limits: Limits, options: dict[str, Any], turns: Run, cases: Sequence[Case], wanted: Size
) -> None:
    summaries = summarise(turns.samples, PLAIN, list(CONTENDERS))
    shapes = {"shapes": [asdict(case.shape) | asdict(case.size) for case in cases]}
    where = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(limits).items()}
    record = Record(
        experiment="kv-offload",
        title=f"KV-cache offload: blocks of {options['tokens']} tokens, {options['durability']}",
        machine=describe_machine(),
        file_system=describe_file_system(limits.root),
        options=where | options | shapes,
        notes=[*_notes(options, turns, cases, wanted), *turns.notes()],
        samples=turns.samples,
        summaries=summaries,
    )
    present(record, _tables(turns.samples, summaries, cases), limits.results, _draw)


def _draw(summaries: Sequence[Summary], **where: Any) -> str | None:
    """Draw what moves bytes: a lookup has none."""
    return draw_bars([s for s in summaries if s.operation in (LOAD, OFFLOAD)], **where)


def _notes(options: dict[str, Any], turns: Run, cases: Sequence[Case], wanted: Size) -> list[str]:
    arriving = "as threads come free" if options["rate"] is None else f"{options['rate']}/s"
    notes = [
        f"{options['threads']} requests at a time, arriving {arriving}; as many I/O threads for "
        "kvio, tensorstore and LMCache; NIXL moves up to eight blocks of a request in one transfer "
        "by libaio, its default; the others move a request's blocks one by one",
        "'offload': new requests; then the page cache of the files is emptied (directory entries "
        "stay cached) and the same requests come again, grown: 'lookup' and 'load'. Shared "
        "prefixes are cold to the first request that loads them only",
        "a lookup of kvio asks for names and lengths; LMCache asks its index in memory; the others "
        "look whether there is a file",
        "p50 and p99 of requests, by nearest rank; MB/s over the time in which any such call was "
        "under way, beside calls of the other kinds; every loaded byte compared, outside of it",
        "of requests that miss the same block at once one offloads it, so that all contenders are "
        "given the same bytes; how much new requests find depends on who was faster",
    ]
    for case in cases:
        size = case.size
        cut = "" if size == wanted else f"; CUT from {wanted.requests} of {wanted.tokens} tokens"
        notes.append(
            f"{case.shape.name}: {size.requests} requests of {size.tokens} tokens in "
            f"{size.request_blocks} blocks, {size.shared_tokens} of them one of {size.prefixes} "
            f"shared prefixes; grown by {size.fresh_tokens}; {len(case.keys)} blocks stored{cut}"
        )
    took_part = dict.fromkeys(sample.contender for sample in turns.samples)
    notes += [f"{name}: {CONTENDERS[name].guarantee}" for name in took_part]
    wrong = [s for s in turns.samples if s.facts.get("unit") and s.intact is False]
    notes += [f"HITS DIFFER: {s.contender}, {s.subject}: {s.facts['hits']}" for s in wrong]
    return notes


def _tables(
    samples: Sequence[Sample], summaries: Sequence[Summary], cases: Sequence[Case]
) -> list[Table]:
    sizes = {case.shape.name: case.block_nbytes for case in cases}
    tables = []
    for operation in _ORDER:
        own = [s for s in summaries if s.operation == operation]
        own.sort(key=lambda s: sizes[s.subject])
        speed = "lookups/s" if operation.startswith(LOOKUP) else "MB/s"
        rows = [_row(s, _latencies(samples, s), sizes[s.subject]) for s in own]
        ends = [i for i, (a, b) in enumerate(pairwise(own)) if a.subject != b.subject]
        if own:
            tables.append(
                Table(
                    title=operation,
                    headings=(*_HEADINGS[:6], speed, *_HEADINGS[6:]),
                    rows=rows,
                    right=frozenset({speed, *_HEADINGS[3:-1]}),
                    rule_after=frozenset(ends),
                )
            )
    return tables


_HEADINGS: Final = (
    *("model", "block", "contender", "requests", "p50 ms", "p99 ms"),
    *("range", "x plain", "cached before", "mode"),
)


def _latencies(samples: Sequence[Sample], summary: Summary) -> list[float]:
    """Give the latencies of requests in all rounds."""
    key = (summary.subject, summary.operation, summary.contender)
    own = [s for s in samples if (s.subject, s.operation, s.contender) == key]
    return [seconds for sample in own for seconds in sample.facts["request_latencies_s"]]


def _row(summary: Summary, latencies_s: Sequence[float], block_nbytes: int) -> tuple[str, ...]:
    unit = 1.0 if summary.block_nbytes == 1 else 1e6
    speeds = (summary.slowest_bytes_per_s, summary.fastest_bytes_per_s)
    modes = ", ".join(
        mode if len(summary.modes) == 1 else f"{mode} {count}"
        for mode, count in summary.modes.items()
    )
    return (
        summary.subject,
        f"{block_nbytes / MiB:.4g} MiB",
        summary.contender,
        str(len(latencies_s)),
        f"{percentile(latencies_s, 50) * 1e3:.2f}",
        f"{percentile(latencies_s, 99) * 1e3:.2f}",
        f"{summary.bytes_per_s / unit:.0f}",
        "-".join(f"{speed / unit:.0f}" for speed in speeds),
        "" if summary.ratio is None else f"{summary.ratio:.2f}",
        "" if summary.cached_before is None else f"{summary.cached_before:.0%}",
        modes,
    )
