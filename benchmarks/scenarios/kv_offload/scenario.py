"""Serve the same requests by every contender: run, claims, tables and plot."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import columns, page_cache
from benchmarks.harness.blocks import Arena, is_same
from benchmarks.harness.columns import Column, table_of
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import Sample, Summary, percentile, time_calls
from benchmarks.harness.plot import Panel, draw_panels, place_text, speed_points
from benchmarks.harness.run import (
    Limits,
    Run,
    Scenario,
    check_least,
    check_names,
    check_room,
    fresh_directory,
)
from benchmarks.harness.shapes import SHAPES, TOKENS_PER_BLOCK
from benchmarks.harness.table import Table
from benchmarks.scenarios.kv_offload.peers import CONTENDERS, PLAIN
from benchmarks.scenarios.kv_offload.requests import (
    Case,
    Request,
    Size,
    distinct_keys,
    predict_hits,
)
from benchmarks.scenarios.kv_offload.serving import (
    LOAD,
    LOOKUP,
    OFFLOAD,
    Offloader,
    Served,
    busy_s,
    serve,
)
from kvio import ConfigError, MiB, UnsupportedError
from kvio.types import Durability

#: Offloads are compared when requests are new, lookups and loads when they come again.
_FIRST: Final = {LOOKUP: "lookup, new requests", LOAD: "load, just offloaded", OFFLOAD: OFFLOAD}
_AGAIN: Final = {LOOKUP: LOOKUP, LOAD: LOAD, OFFLOAD: "offload, among loads"}
_ORDER: Final = (*_AGAIN.values(), *_FIRST.values())
_SEED: Final = 20260101

SCENARIO: Final = Scenario(
    name="kv-offload",
    title="KV-cache offload",
    reference=PLAIN,
    contenders=tuple(CONTENDERS),
    claims=(
        Claim(
            text="O_TMPFILE allows better offloading performance (proposal)",
            pairs=[("posix-tmpfile", PLAIN)],
            at_least=1.0,
            operations=[OFFLOAD],
        ),
        Claim(
            text="blocks of several MiB are offloaded faster without a user-space copy (proposal)",
            pairs=[
                (PLAIN, copying) for copying in ("safetensors", "tensorstore", "obstore LocalStore")
            ],
            at_least=1.0,
            operations=[OFFLOAD],
        ),
        Claim(
            text="kvio loads, and verifies, as fast as plain Python loads",
            pairs=[(name, PLAIN) for name in ("posix-tmpfile", "hybrid")],
            at_least=0.95,
            operations=[LOAD],
        ),
    ),
)


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
    """Serve the same requests by every contender, and print, write and plot what was found.

    Requests are cut in number and length until a trial offloads no more than ``max_bytes``.
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
        rate: arrivals a second; None: the next arrives when a thread is free.
        durability: of what is offloaded.
        contenders: names of `CONTENDERS`; all without it.

    Returns:
        The exit status: 0; 1 if a byte differed or a block was lost; 130 after Ctrl-C.

    Raises:
        ConfigError: a name or a number cannot be, or the disk or the memory has no room.
    """
    options = {name: value for name, value in locals().items() if name != "limits"}
    names = list(CONTENDERS if contenders is None else contenders)
    _check(options, names)
    wanted = Size(
        requests=requests,
        tokens=request_tokens,
        fresh_tokens=round(fresh * request_tokens),
        shared=shared,
        block_tokens=tokens,
    )
    cases = [Case(SHAPES[model], wanted, limits.max_bytes) for model in models]
    stored = max(case.source_nbytes for case in cases)
    held = stored + max(case.target_nbytes for case in cases)
    check_room(limits.root, 2 * stored, 2 * held)
    scenario = replace(SCENARIO, title=f"KV-cache offload: blocks of {tokens} tokens, {durability}")
    shapes = [asdict(case.shape) | asdict(case.size) for case in cases]
    this = Run(scenario, limits, options | {"shapes": shapes})
    missing = {name: CONTENDERS[name].missing() for name in names}
    this.left_out |= {name: why for name, why in missing.items() if why}
    with this.workplace() as base:
        trials = _Trials(base, cases, threads=threads, rate=rate, durability=durability)
        this.take_trials(cases, names, trials.take)
        return this.finish(_notes(options, this.samples, cases, wanted), _tables, _draw)


def _check(options: dict[str, Any], names: Sequence[str]) -> None:
    check_least(**{n: options[n] for n in ("tokens", "requests", "request_tokens", "threads")})
    if options["request_tokens"] < options["tokens"]:
        raise ConfigError("request_tokens must be at least the tokens of one block")
    for name in ("shared", "fresh"):
        if not 0 <= options[name] <= 1:
            raise ConfigError(f"{name} must be from 0 to 1")
    if options["rate"] is not None and not options["rate"] > 0:
        raise ConfigError("rate must be above 0")
    check_names("durability", [options["durability"]], ("visible", "durable"))
    check_names("model", options["models"], SHAPES)
    check_names("contender", names, CONTENDERS)


class _Trials:
    """What a trial does: new requests, an empty page cache, the same requests grown."""

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

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Serve all requests on a fresh directory; a sample per operation and time."""
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


def _notes(
    options: dict[str, Any], samples: Sequence[Sample], cases: Sequence[Case], wanted: Size
) -> list[str]:
    arriving = "as threads come free" if options["rate"] is None else f"{options['rate']}/s"
    notes = [
        f"{options['threads']} requests at a time, arriving {arriving}; as many I/O threads for "
        "kvio, tensorstore and LMCache; NIXL moves up to eight blocks of a request in one transfer "
        "by libaio, its default; the others move a request's blocks one by one",
        "'offload': new requests; then the page cache of the files is emptied (directory entries "
        "stay cached) and the same requests come again, grown: 'lookup' and 'load'. Shared "
        "prefixes are cold to the first request that loads them only",
        "a lookup of kvio asks for names and lengths; LMCache asks its index in memory; the others "
        "check that there is a file",
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
    took_part = dict.fromkeys(sample.contender for sample in samples)
    notes += [f"{name}: {CONTENDERS[name].guarantee}" for name in took_part]
    wrong = [s for s in samples if s.facts.get("unit") and s.intact is False]
    notes += [f"HITS DIFFER: {s.contender}, {s.subject}: {s.facts['hits']}" for s in wrong]
    return notes


def _draw(summaries: Sequence[Summary], **where: Any) -> str | None:
    """Draw loads and offloads in MB/s, and lookups a second below them."""
    panels = [
        Panel(
            title=operation,
            unit="lookups/s" if operation == LOOKUP else "MB/s",
            points=speed_points(own, _label, unit=1.0 if operation == LOOKUP else 1e6),
        )
        for operation in (LOAD, OFFLOAD, LOOKUP)
        if (own := [s for s in summaries if s.operation == operation])
    ]
    return draw_panels(panels, **where)


def _label(summary: Summary) -> str:
    return summary.subject if summary.block_nbytes == 1 else place_text(summary)


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table per operation; percentiles are those of requests."""
    sizes = {s.subject: s.block_nbytes for s in summaries if s.block_nbytes > 1}
    tables = []
    for operation in _ORDER:
        own = [s for s in summaries if s.operation == operation]
        own.sort(key=lambda s: sizes.get(s.subject, 0))
        lookup = operation.startswith(LOOKUP)
        unit = 1.0 if lookup else 1e6
        headings: dict[str, Column] = {
            "model": columns.SUBJECT,
            "block": lambda s, _: f"{sizes.get(s.subject, 0) / MiB:.4g} MiB",
            "contender": columns.CONTENDER,
            "rounds": columns.ROUNDS,
            "requests": lambda _, of: str(len(_latencies(of))),
            "p50 ms": lambda _, of: f"{percentile(_latencies(of), 50) * 1e3:.2f}",
            "p99 ms": lambda _, of: f"{percentile(_latencies(of), 99) * 1e3:.2f}",
            "lookups/s" if lookup else "MB/s": partial(_speed, unit),
            "range": partial(_range, unit),
            "x plain": columns.RATIO,
            "cached before": lambda s, _: columns.number(s.cached_before, ".0%"),
            "mode": columns.MODE,
        }
        if own:
            tables.append(
                table_of(operation, own, samples, headings, left=("model", "contender", "mode"))
            )
    return tables


def _speed(unit: float, summary: Summary, _: Sequence[Sample]) -> str:
    return f"{summary.bytes_per_s / unit:.0f}"


def _range(unit: float, summary: Summary, _: Sequence[Sample]) -> str:
    return f"{summary.slowest_bytes_per_s / unit:.0f}-{summary.fastest_bytes_per_s / unit:.0f}"


def _latencies(samples: Sequence[Sample]) -> list[float]:
    """List the latencies of requests in all rounds."""
    return [seconds for sample in samples for seconds in sample.facts["request_latencies_s"]]
