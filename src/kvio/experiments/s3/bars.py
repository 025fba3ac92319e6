"""What must be reached, whether it is, and the null hypotheses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from kvio.experiments.measure import Sample
from kvio.experiments.plot import size_text
from kvio.experiments.s3 import ratios
from kvio.experiments.s3.order import FLOOR, GET, LIBRARIES, PUT, RANGE, library_of
from kvio.experiments.s3.plan import LIBRARIES as PART_LIBRARIES
from kvio.experiments.s3.plan import LIBRARY_THREADS, PROCESSES, SCALE, THREADS
from kvio.experiments.s3.ratios import Measure, Place, Ratio, Rounds
from kvio.experiments.table import Table

#: Of a library called directly in the same configuration.
LEAST_SPEED: Final = 0.97
MOST_CPU: Final = 1.05
RULE: Final = (
    f"a difference is one where every round's ratio lies on the same side of 1 and the median is "
    f"more than {ratios.MARGIN:.0%} away; of fewer than {ratios.ROUNDS} rounds nothing is said"
)
_Groups: TypeAlias = Mapping[tuple[Place, str], Rounds]
_CONSIDERED: Final = (PUT, GET, RANGE)


class Bar(NamedTuple):
    """Something to be reached: at least or at most so much of another contender."""

    text: str
    kind: str
    other: str
    measure: Measure
    limit: float
    at_least: bool


BARS: Final = (
    Bar("MB/s of direct", "kvio", "direct", ratios.speed, LEAST_SPEED, at_least=True),
    Bar("CPU of direct", "kvio", "direct", ratios.cpu_s_per_gib, MOST_CPU, at_least=False),
    Bar("MB/s of defaults", "kvio", "defaults", ratios.speed, 1.0, at_least=True),
    Bar(
        "MB/s of defaults, layout=block", "kvio block", "defaults", ratios.speed, 1.0, at_least=True
    ),
)
_HEADINGS: Final = ("library", "operation", "size", "threads", "bar", "limit", "measured", "holds")


def bars(samples: Sequence[Sample]) -> Table | None:
    """Say of every library, size and operation which bars hold; None where none was measured."""
    groups = ratios.grouped(samples)
    rows = [row for library in LIBRARIES for row in _rows(groups, library)]
    if not rows:
        return None
    return Table(
        title="What must be reached",
        headings=_HEADINGS,
        rows=rows,
        right=frozenset({"size", "threads", "limit", "measured"}),
    )


def _rows(groups: _Groups, library: str) -> Iterator[tuple[str, ...]]:
    places = dict.fromkeys(place for place, name in groups if library_of(name) == library)
    for place in sorted(places, key=lambda place: (place[2], place[1])):
        subject, nbytes, operation = place
        if not subject.startswith(SCALE) or operation not in _CONSIDERED:
            continue
        for bar in BARS:
            found = _between(groups, place, f"{library} {bar.kind}", f"{library} {bar.other}", bar)
            if found is not None:
                sign = ">=" if bar.at_least else "<="
                yield (
                    library,
                    operation,
                    size_text(nbytes),
                    subject.rpartition(": ")[2].partition(" ")[0],
                    bar.text,
                    f"{sign} {bar.limit:.2f}",
                    str(found),
                    _holds(found, bar),
                )


def _between(groups: _Groups, place: Place, one: str, other: str, bar: Bar) -> Ratio | None:
    return ratios.ratio(groups.get((place, one)), groups.get((place, other)), bar.measure)


def _holds(found: Ratio, bar: Bar) -> str:
    best = max(found.values) if bar.at_least else min(found.values)
    if _reaches(found.median, bar):
        return "yes"
    return "no, but in some round" if _reaches(best, bar) else "NO"


def _reaches(value: float, bar: Bar) -> bool:
    return value >= bar.limit if bar.at_least else value <= bar.limit


def hypotheses(samples: Sequence[Sample]) -> Table | None:
    """Accept or reject each null hypothesis; None where there is nothing to go by."""
    groups = ratios.grouped(samples)
    libraries = [
        library
        for library in LIBRARIES
        if any(library_of(name) == library for _, name in groups)
    ]  # fmt: skip
    rows: list[tuple[str, str, str, str]] = []
    for library in libraries:
        rows += _threads_do_not_matter(groups, library)
    rows += _libraries_are_alike(groups, libraries)
    for library in libraries:
        rows += _processes_scale(groups, library)
    for library in libraries:
        rows += _sizes_do_not_matter(groups, library)
    for library in libraries:
        rows += _kvio_costs_nothing(groups, library)
    if not rows:
        return None
    headings = ("null hypothesis", "of", "verdict", "evidence")
    return Table(title="Null hypotheses", headings=headings, rows=rows)


def _verdict(found: Ratio | None) -> str:
    if found is None or not found.decided:
        return f"not decided: fewer than {ratios.ROUNDS} rounds"
    return "REJECTED" if found.differs else "not rejected"


def _threads_do_not_matter(groups: _Groups, library: str) -> Iterator[tuple[str, str, str, str]]:
    own = _puts(groups, f"{library} kvio", THREADS)
    if len(own) < 2:
        return
    ordered = sorted(own, key=lambda at: ratios.middle(own[at], ratios.speed))
    slowest, fastest = ordered[0], ordered[-1]
    found = ratios.ratio(own[fastest], own[slowest], ratios.speed)
    yield (
        "H0-1: write throughput does not depend on the thread count",
        library,
        _verdict(found),
        f"{_number(fastest)} threads by {_number(slowest)}: {found}",
    )


def _libraries_are_alike(
    groups: _Groups, libraries: Sequence[str]
) -> Iterator[tuple[str, str, str, str]]:
    shares: dict[str, Ratio] = {}
    for library in libraries:
        for place, rounds in _puts(groups, f"{library} kvio", PART_LIBRARIES).items():
            share = ratios.ratio(rounds, groups.get((place, FLOOR)), ratios.speed)
            if share is not None:
                shares[library] = share
    if len(shares) < 2:
        return
    slowest, *_, fastest = sorted(shares, key=lambda library: shares[library].median)
    above, below = shares[fastest], shares[slowest]
    # Of each library in an environment of its own no round is another's: all are set against all.
    found = Ratio(tuple(one / other for one in above.values for other in below.values))
    yield (
        f"H0-2: the libraries do not differ at {LIBRARY_THREADS} threads",
        ", ".join(shares),
        _verdict(found if above.decided and below.decided else None),
        f"shares of the floor, {fastest} by {slowest}: {found}",
    )


def _processes_scale(groups: _Groups, library: str) -> Iterator[tuple[str, str, str, str]]:
    own = {int(_number(at)): r for at, r in _puts(groups, f"{library} kvio", PROCESSES).items()}
    if 1 not in own or len(own) < 2:
        return
    most = max(own)
    raw = ratios.ratio(own[most], own[1], ratios.speed)
    found = None if raw is None else Ratio(tuple(value / most for value in raw.values))
    yield (
        "H0-3: throughput scales ideally with processes",
        library,
        _verdict(found),
        f"{most} processes reach {found} of {most} times one",
    )


def _sizes_do_not_matter(groups: _Groups, library: str) -> Iterator[tuple[str, str, str, str]]:
    """Take the count that is best at most sizes, and look whether another is better somewhere."""
    by_size = best_threads(groups, library, PUT)
    if len(by_size) < 2:
        return
    favourites = [best for best, _ in by_size.values()]
    common = max(favourites, key=favourites.count)
    against: list[tuple[int, Ratio]] = []
    for nbytes, (best, rounds) in by_size.items():
        found = ratios.ratio(rounds[best], rounds.get(common), ratios.speed)
        if found is not None:
            against.append((nbytes, found))
    worst = max(against, key=lambda pair: (pair[1].differs, pair[1].median))
    told = ", ".join(f"{size_text(n)}: {best}" for n, (best, _) in by_size.items())
    yield (
        "H0-4: the best thread count does not depend on the object size",
        library,
        _verdict(worst[1]),
        f"best: {told}; at {size_text(worst[0])} the best by {common} threads: {worst[1]}",
    )


def best_threads(
    groups: _Groups, library: str, operation: str
) -> dict[int, tuple[int, dict[int, Rounds]]]:
    """Give the best thread count for every size, with the rounds of all counts."""
    found: dict[int, dict[int, Rounds]] = {}
    for (place, name), rounds in groups.items():
        subject, nbytes, what = place
        if name == f"{library} kvio" and what == operation and subject.startswith(SCALE):
            found.setdefault(nbytes, {})[int(_number(place))] = rounds
    return {
        nbytes: (max(own, key=lambda count: ratios.middle(own[count], ratios.speed)), own)
        for nbytes, own in sorted(found.items())
        if len(own) > 1
    }


def _kvio_costs_nothing(groups: _Groups, library: str) -> Iterator[tuple[str, str, str, str]]:
    speed_bar, cpu_bar = BARS[:2]
    for bar in (speed_bar, cpu_bar):
        found = {
            place: between
            for place, name in groups
            if name == f"{library} kvio"
            and place[2] in _CONSIDERED
            and (between := _between(groups, place, name, f"{library} direct", bar))
        }
        if not found:
            continue
        values = [one.median for one in found.values()]
        worse = [r for r in found.values() if r.differs and (r.median < 1) == bar.at_least]
        decided = any(one.decided for one in found.values())
        verdict = "REJECTED" if worse else "not rejected"
        yield (
            f"H0-5: kvio costs nothing over the library: {bar.text}",
            library,
            verdict if decided else _verdict(None),
            f"worse at {len(worse)} of {len(found)} places; medians {min(values):.2f}-"
            f"{max(values):.2f}",
        )


def _puts(groups: _Groups, contender: str, part: str) -> dict[Place, Rounds]:
    return {
        place: rounds
        for (place, name), rounds in groups.items()
        if name == contender and place[2] == PUT and place[0].startswith(f"{part}: ")
    }


def _number(place: Place) -> str:
    """Read the number of threads, or of processes, out of a subject."""
    return place[0].rpartition(": ")[2].partition(" ")[0]
