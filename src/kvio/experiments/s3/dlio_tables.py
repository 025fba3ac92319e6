"""Tables of what DLIO generated, beside what the direct harness put."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from kvio import MiB
from kvio.experiments.measure import Sample
from kvio.experiments.plot import size_text
from kvio.experiments.s3 import ratios
from kvio.experiments.s3.bars import hypotheses
from kvio.experiments.s3.dlio_plan import CONTENDERS, STOCK
from kvio.experiments.s3.order import FLOOR, LIBRARIES
from kvio.experiments.s3.plan import LIBRARIES as PART_LIBRARIES
from kvio.experiments.s3.plan import PROCESSES, REAL, SCALE, THREADS
from kvio.experiments.s3.ratios import Measure, Place, Ratio, Rounds
from kvio.experiments.table import Table

_TITLES: Final = {
    THREADS: "1. Write threads",
    PART_LIBRARIES: "2. Libraries at 32 threads",
    PROCESSES: "3. Processes of 8 threads each",
    SCALE: "4. Object sizes and threads",
    REAL: "On a real server",
}
_HEADINGS: Final = (
    "load", "size", "library", "MB/s", "range", "direct MB/s", "via DLIO : direct",
    "MiB/s of elapsed", "elapsed s", "direct elapsed s", "objects", "MB", "errors",
)  # fmt: skip
_CPU_HEADINGS: Final = (
    "load", "size", "library", "user s", "system s", "start s", "generate s", "store s",
    "direct s", "server s",
)  # fmt: skip

Groups = Mapping[tuple[Place, str], Rounds]


def window_speed(sample: Sample) -> float:
    """Give bytes a second from the first PUT to the end of the last."""
    return float(sample.facts.get("bytes", _moved(sample))) / sample.wall_s


def elapsed_speed(sample: Sample) -> float:
    """Give bytes a second of all that the processes took: the original's metric."""
    return float(sample.facts.get("bytes", _moved(sample))) / float(sample.facts["process_wall_s"])


def tables(samples: Sequence[Sample]) -> list[Table]:
    """Make every table there is something for."""
    found: list[Table | None] = []
    for part, title in _TITLES.items():
        groups = ratios.grouped(s for s in samples if part in s.facts["parts"])
        found += [_speeds(groups, title), _cpu(groups, title)]
        if part == PROCESSES:
            found.append(_scaling(groups))
    found += [
        _hypotheses(samples, "by elapsed time, as the original", "process_wall_s"),
        _hypotheses(samples, "by the window", None),
    ]
    return [table for table in found if table is not None]


def stored_by(groups: Groups, place: Place, name: str) -> tuple[Rounds | None, Rounds | None]:
    """Give the rounds of the direct harness of the same load, and of stock DLIO."""
    library = name.partition(" ")[0]
    return groups.get((place, f"{library} kvio")), groups.get((place, STOCK))


def _speeds(groups: Groups, title: str) -> Table | None:
    return _table(groups, title, _HEADINGS, _speed_row)


def _cpu(groups: Groups, title: str) -> Table | None:
    return _table(groups, f"{title}: CPU of all ranks, from start to end", _CPU_HEADINGS, _cpu_row)


def _table(
    groups: Groups,
    title: str,
    headings: Sequence[str],
    row: Callable[[Groups, Place, str], tuple[str, ...]],
) -> Table | None:
    order = sorted((key for key in groups if not key[1].endswith(" kvio")), key=_rank_in(groups))
    if not order:
        return None
    ends = [at for at, (this, after) in enumerate(pairwise(order)) if this[0] != after[0]]
    return Table(
        title=title,
        headings=headings,
        rows=[row(groups, *key) for key in order],
        right=frozenset(headings) - {"load", "library"},
        rule_after=frozenset(ends),
    )


def _rank_in(groups: Groups) -> Callable[[tuple[Place, str]], tuple[int, int, int, int]]:
    def rank(key: tuple[Place, str]) -> tuple[int, int, int, int]:
        facts = _first(groups[key]).facts
        return key[0][1], facts["processes"], facts["threads"], CONTENDERS.index(key[1])

    return rank


def _speed_row(groups: Groups, place: Place, name: str) -> tuple[str, ...]:
    rounds = groups[place, name]
    direct, _ = stored_by(groups, place, name)
    speeds = [window_speed(sample) / 1e6 for sample in rounds.values()]
    facts = [sample.facts for sample in rounds.values()]
    against = ratios.ratio(rounds, direct, window_speed)
    return (
        *_names(place, name),
        f"{statistics.median(speeds):.0f}",
        f"{min(speeds):.0f}-{max(speeds):.0f}",
        _middle(direct, lambda s: window_speed(s) / 1e6, "{:.0f}"),
        "" if against is None else str(against),
        _middle(rounds, lambda s: elapsed_speed(s) / MiB, "{:.0f}"),
        _middle(rounds, _fact("process_wall_s"), "{:.2f}"),
        _middle(_whole(direct), _fact("process_wall_s"), "{:.2f}"),
        str(facts[0]["objects"]),
        f"{facts[0]['bytes'] / 1e6:.0f}",
        str(sum(one["errors"] for one in facts)),
    )


def _cpu_row(groups: Groups, place: Place, name: str) -> tuple[str, ...]:
    rounds = groups[place, name]
    direct, stock = stored_by(groups, place, name)
    total = _fact("process_cpu_s")
    start = _fact("start_cpu_s")
    more = None
    if stock is not None and name != STOCK:
        more = [total(rounds[at]) - total(stock[at]) for at in rounds if at in stock]
    server = [s.facts["server_s"] for s in rounds.values() if s.facts["server_s"] is not None]
    return (
        *_names(place, name),
        _middle(rounds, _fact("user_s"), "{:.2f}"),
        _middle(rounds, _fact("system_s"), "{:.2f}"),
        _middle(stock, start, "{:.2f}"),
        _middle(stock, lambda s: total(s) - start(s), "{:.2f}"),
        f"{statistics.median(more):.2f}" if more else "",
        _middle(_whole(direct), total, "{:.2f}"),
        f"{statistics.median(server):.2f}" if server else "",
    )


def _scaling(groups: Groups) -> Table | None:
    rows = []
    for library in LIBRARIES:
        counts = {
            _first(rounds).facts["processes"]: place
            for (place, name), rounds in groups.items()
            if name == f"{library} dlio"
        }
        if 1 not in counts:
            continue
        for count in sorted(set(counts) - {1}):
            cells = [_ideal(groups, counts, f"{library} dlio", count, window_speed)]
            cells.append(_ideal(groups, counts, f"{library} dlio", count, elapsed_speed))
            cells.append(_ideal(groups, counts, f"{library} kvio", count, window_speed))
            rows.append((library, str(count), *cells))
    if not rows:
        return None
    headings = ("library", "processes", "window", "elapsed", "direct window")
    return Table(
        title="Scaling efficiency: actual / ideal",
        headings=headings,
        rows=rows,
        right=frozenset(headings[1:]),
    )


def _hypotheses(samples: Sequence[Sample], title: str, wall: str | None) -> Table | None:
    """Ask of DLIO what `bars` asks of the direct harness; stock DLIO is the floor."""
    renamed = {f"{library} dlio": f"{library} kvio" for library in LIBRARIES} | {STOCK: FLOOR}
    made = hypotheses([
        replace(
            sample,
            subject=f"{part}: {_load_text(sample, part)}",
            contender=renamed[sample.contender],
            wall_s=sample.wall_s if wall is None else sample.facts[wall],
        )
        for sample in samples
        if sample.contender in renamed
        for part in sample.facts["parts"]
    ])  # fmt: skip
    return None if made is None else replace(made, title=f"{made.title}, {title}")


def _load_text(sample: Sample, part: str) -> str:
    threads = f"{sample.facts['threads']} threads"
    return f"{sample.facts['processes']} x {threads}" if part == PROCESSES else threads


def _ideal(
    groups: Groups, counts: Mapping[int, Place], name: str, count: int, measure: Measure
) -> str:
    many, one = groups.get((counts[count], name)), groups.get((counts[1], name))
    found = ratios.ratio(many, one, measure)
    return "" if found is None else str(Ratio(tuple(value / count for value in found.values)))


def _names(place: Place, name: str) -> tuple[str, str, str]:
    load = place[0].partition(": ")[2]
    return load, size_text(place[1]), STOCK if name == STOCK else name.partition(" ")[0]


def _fact(name: str) -> Measure:
    return lambda sample: float(sample.facts[name])


def _middle(rounds: Rounds | None, measure: Measure, form: str) -> str:
    return form.format(ratios.middle(rounds, measure)) if rounds else ""


def _whole(direct: Rounds | None) -> Rounds | None:
    """Leave out rounds in which the direct harness put fewer objects, as its time was over."""
    if direct is None:
        return None
    return {at: sample for at, sample in direct.items() if not sample.facts["cut_short"]}


def _moved(sample: Sample) -> int:
    return sample.block_nbytes * len(sample.latencies_s)


def _first(rounds: Rounds) -> Sample:
    return next(iter(rounds.values()))
