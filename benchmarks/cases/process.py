"""Bar 6: the time to import kvio, and memory while writing far more than may be queued."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks.measure import Bench, MiB, Row, Summary, limit_bar, summarize

_BAR = "6 process"
_QUEUE_BYTES: Final = 256 * MiB
_BLOCK_BYTES: Final = 4 * MiB
_TOTAL_BYTES: Final = 10 << 30
_CHILD: Final = Path(__file__).with_name("process_child.py")


def run(bench: Bench) -> Iterator[Row]:
    """Start interpreters with and without kvio, then children that write 10 GiB."""
    yield from _import_time(bench)
    for backend in ("posix-tmpfile", "hybrid"):
        yield _memory(bench, backend)


def _import_time(bench: Bench) -> Iterator[Row]:
    names = ("python -c 'import kvio'", "python -c pass")
    samples = bench.interleave({name: partial(_start, name) for name in names})
    inner = [_import_time_of_kvio() for _ in range(bench.rounds)]
    whole, bare = samples.values()
    added = [(a - b) * 1e3 for a, b in zip(whole, bare, strict=True)]
    yield limit_bar(
        _BAR, "import kvio, added to the process", summarize(added), "with minus without",
        unit="ms", at_most=100, samples=samples,
    )  # fmt: skip
    yield limit_bar(
        _BAR, "import kvio, python -X importtime", summarize(inner), "cumulative",
        unit="ms", at_most=100, samples={"importtime_ms": inner},
    )  # fmt: skip


def _start(command: str) -> float:
    start = perf_counter()
    subprocess.run((sys.executable, *shlex.split(command)[1:]), check=True)
    return perf_counter() - start


def _import_time_of_kvio() -> float:
    command = (sys.executable, "-X", "importtime", "-c", "import kvio")
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = re.search(r"\| +(\d+) \| kvio$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1e3


def _memory(bench: Bench, backend: str) -> Row:
    total = int(_TOTAL_BYTES * min(1.0, bench.scale))
    command = (sys.executable, str(_CHILD), backend, str(bench.ground.scratch()), str(total),
               str(_BLOCK_BYTES), str(_QUEUE_BYTES))  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    grown = [figures["peak_bytes"] / MiB - figures["before_bytes"] / MiB]
    bench.ground.settle()
    return limit_bar(
        _BAR,
        f"peak memory, {figures['written_bytes'] / (1 << 30):.1f} GiB submitted, {backend}",
        Summary(*grown * 3),
        f"{_BLOCK_BYTES // MiB} MiB blocks, {_QUEUE_BYTES // MiB} MiB queued",
        unit="MiB",
        at_most=(_QUEUE_BYTES + figures["slack_bytes"]) / MiB,
        samples={"peak_minus_before_mib": grown},
        note=f"{figures['seconds']:.1f} s; {figures['slack_text']}",
    )
