"""Tables of summaries: a row per contender and place, and the columns that most tables have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Final, TypeAlias

from benchmarks.harness.measure import Sample, Summary
from benchmarks.harness.plot import size_text
from benchmarks.harness.table import Table

#: Writes a cell from a summary and the samples that it sums up.
Column: TypeAlias = Callable[[Summary, Sequence[Sample]], str]


def table_of(
    title: str,
    summaries: Sequence[Summary],
    samples: Sequence[Sample],
    columns: Mapping[str, Column],
    *,
    left: Collection[str] = ("contender",),
) -> Table:
    """Make a table of summaries in their order, with a rule between subjects and sizes.

    Args:
        title: of the table.
        summaries: a row each.
        samples: of the whole run.
        columns: by heading.
        left: headings of columns that hold no numbers.
    """
    rows = [
        tuple(column(one, own) for column in columns.values())
        for one in summaries
        for own in [samples_of(one, samples)]
    ]
    places = [(one.subject, one.block_nbytes) for one in summaries]
    return Table(
        title=title,
        headings=tuple(columns),
        rows=rows,
        right=frozenset(columns) - frozenset(left),
        rule_after=frozenset(i for i, (one, after) in enumerate(pairwise(places)) if one != after),
    )


def samples_of(summary: Summary, samples: Sequence[Sample]) -> list[Sample]:
    """List the samples that a summary sums up."""
    place = (summary.subject, summary.block_nbytes, summary.operation, summary.contender)
    return [s for s in samples if (s.subject, s.block_nbytes, s.operation, s.contender) == place]


def ratio_text(summary: Summary) -> str:
    """Write the ratio to the reference with its interval; empty: there is none."""
    if summary.ratio is None:
        return ""
    if summary.ratio_low is None:
        return f"{summary.ratio:.2f}"
    return f"{summary.ratio:.2f} [{summary.ratio_low:.2f}, {summary.ratio_high:.2f}]"


def number(value: float | None, form: str = ".2f") -> str:
    """Write a number; empty: there is none."""
    return "" if value is None else format(value, form)


def median_of(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """Return the median over rounds of what is known of each; None: nothing is."""
    found = [one for sample in samples if (one := value(sample)) is not None]
    return median(found) if found else None


def fact(name: str, form: str = ".2f", scale: float = 1.0) -> Column:
    """Return a column with the median of one of a sample's facts, times *scale*."""

    def value(sample: Sample) -> float | None:
        found = sample.facts.get(name)
        return None if found is None else found * scale

    return lambda _, own: number(median_of(own, value), form)


def mode_text(summary: Summary) -> str:
    """Write the I/O modes with the blocks of each; a single one without a number."""
    if len(summary.modes) == 1:
        return next(iter(summary.modes))
    return ", ".join(f"{mode} {count}" for mode, count in summary.modes.items())


SUBJECT: Final[Column] = lambda s, _: s.subject  # noqa: E731  # columns are values
SIZE: Final[Column] = lambda s, _: size_text(s.block_nbytes)  # noqa: E731
CONTENDER: Final[Column] = lambda s, _: s.contender  # noqa: E731
ROUNDS: Final[Column] = lambda s, _: str(s.rounds)  # noqa: E731
SPEED: Final[Column] = lambda s, _: f"{s.bytes_per_s / 1e6:.0f}"  # noqa: E731
RATIO: Final[Column] = lambda s, _: ratio_text(s)  # noqa: E731
P50_MS: Final[Column] = lambda s, _: f"{s.p50_s * 1e3:.2f}"  # noqa: E731
P99_MS: Final[Column] = lambda s, _: f"{s.p99_s * 1e3:.2f}"  # noqa: E731
MODE: Final[Column] = lambda s, _: mode_text(s)  # noqa: E731
RANGE: Final[Column] = lambda s, _: (  # noqa: E731
    f"{s.slowest_bytes_per_s / 1e6:.0f}-{s.fastest_bytes_per_s / 1e6:.0f}"
)
