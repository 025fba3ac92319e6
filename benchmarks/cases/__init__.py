"""One module a bar: each yields the rows of its part of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.cases import batch, direct, durable, hybrid, process, single
from benchmarks.measure import Bench, Row

CASES: Final[dict[str, Callable[[Bench], Iterator[Row]]]] = {
    "single": single.run,
    "batch": batch.run,
    "direct": direct.run,
    "hybrid": hybrid.run,
    "durable": durable.run,
    "process": process.run,
}
