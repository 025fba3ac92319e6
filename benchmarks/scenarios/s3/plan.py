"""Which loads are measured: the four parts of the original, and reads; fewer in little time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.harness.intervals import least_rounds
from benchmarks.harness.plot import size_text
from benchmarks.scenarios.s3.libraries import (
    FLOOR,
    GET,
    HEAD,
    KINDS,
    LIST,
    OPERATIONS,
    PUT,
    RANGE,
    kind_of,
    library_of,
)
from kvio import KiB, MiB

#: The mean JPEG of the retinanet data set, which the original put.
OBJECT_NBYTES: Final = 322_957
SIZES: Final = (64 * KiB, 315 * KiB, MiB, 4 * MiB, 16 * MiB)
#: Names of the parts, as subjects and tables have them.
THREADS: Final = "threads"
LIBRARIES: Final = "libraries"
READS: Final = "reads"
PROCESSES: Final = "processes"
SCALE: Final = "sizes"
REAL: Final = "real server"
PARTS: Final = ("1", "2", "3", "4", "get")
#: Of every process, in part 3; and of part 2.
PROCESS_THREADS: Final = 8
LIBRARY_THREADS: Final = 32

#: Enough for a verdict on one comparison, a few, or a single one.
ROUNDS_WANTED: Final = (least_rounds(), 3, 1)
#: Seconds of a trial beside its calls, on two cores; and of the start of a process.
_TRIAL_S: Final = 0.3
_PROCESS_S: Final = 0.25
#: What a trial moves a second with any library, and what a call takes beside its bytes.
_BYTES_PER_S: Final = 800e6
_CALL_S: Final = {"boto3": 2.5e-3, "minio": 0.6e-3, "torch": 1.0e-3}
_LEAST_CALL_S: Final = 0.2e-3
#: At least, where bytes allow it: with fewer, a window is mostly its first and last calls.
_CALLS_OF_A_THREAD: Final = 4
#: Bytes of all objects of one trial at most, in a client's memory and in the server's.
_MOST_NBYTES: Final = 512 * MiB
_ALL: Final = (FLOOR, *KINDS)
_KVIO: Final = (FLOOR, "kvio")
_PAIR: Final = (FLOOR, "kvio", "direct")
_READS: Final = (GET, RANGE, HEAD, LIST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load, measured with contenders of some kinds."""

    part: str
    nbytes: int
    threads: int
    processes: int
    count: int
    operations: tuple[str, ...]
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.subject}, {size_text(self.nbytes)}, {'+'.join(self.operations)}"

    @property
    def subject(self) -> str:
        """Name it in tables."""
        if self.part == PROCESSES:
            return f"{self.part}: {self.processes} x {self.threads} threads"
        return f"{self.part}: {self.threads} thread{'s' * (self.threads > 1)}"

    def takes(self, contender: str) -> bool:
        """Report whether a contender takes part."""
        return kind_of(contender) in self.kinds

    def seconds(self, contenders: Sequence[str]) -> float:
        """Estimate how long one round of its trials takes."""
        takers = [name for name in contenders if self.takes(name)]
        moved = self.nbytes * sum(name in (PUT, GET, RANGE) for name in self.operations)
        calls = self.count * self.processes
        once = _TRIAL_S + self.processes * _PROCESS_S + calls * moved / _BYTES_PER_S
        each = (_CALL_S.get(library_of(name), _LEAST_CALL_S) for name in takers)
        return len(takers) * once + sum(each) * calls * len(self.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinness:
    """How much of everything is measured.

    Attributes:
        others: kinds that take part in parts 1 and 3.
        size_kinds: those at the first of `size_threads`, and those at the others.
        objects_by: the divisor of the numbers of objects.
    """

    threads: tuple[int, ...]
    processes: tuple[int, ...]
    sizes: tuple[int, ...]
    size_threads: tuple[int, ...]
    others: tuple[str, ...]
    size_kinds: tuple[tuple[str, ...], tuple[str, ...]]
    read_kinds: tuple[str, ...] = _ALL
    objects_by: int = 1

    def left_out(self, parts: Sequence[str] = PARTS) -> list[str]:
        """Return what the whole scenario has in some parts and this level has not."""
        whole, absent = LEVELS[0], []
        varied = {"threads": "1", "processes": "3", "sizes": "4", "size_threads": "4"}
        for name in (name for name, part in varied.items() if part in parts):
            gone = [value for value in getattr(whole, name) if value not in getattr(self, name)]
            if gone:
                values = ", ".join(size_text(n) if name == "sizes" else str(n) for n in gone)
                absent.append(f"{name.replace('_', ' ')} {values}")
        if self.others != whole.others and {"1", "3"} & set(parts):
            absent.append("direct, defaults and kvio block in parts 1 and 3")
        if self.read_kinds != whole.read_kinds and "get" in parts:
            absent.append("defaults and kvio block in reads")
        if self.objects_by > 1:
            absent.append(f"all objects but one of {self.objects_by}")
        if self.size_kinds != whole.size_kinds and "4" in parts:
            at = f"{self.size_threads[0]} threads"
            for where, kinds in zip((at, "other threads"), self.size_kinds, strict=True):
                if missing := ", ".join(kind for kind in _ALL if kind not in kinds):
                    absent.append(f"in part 4 at {where}: {missing}")
        return absent


#: From everything to what two minutes have room for.
LEVELS: Final = (
    Thinness(
        threads=(1, 2, 4, 8, 16, 32, 64, 128), processes=(1, 2, 4, 8), sizes=SIZES,
        size_threads=(8, 1, 2, 4, 16, 32, 64), others=_ALL, size_kinds=(_ALL, _ALL),
    ),
    Thinness(
        threads=(1, 2, 4, 8, 16, 32, 64, 128), processes=(1, 2, 4, 8), sizes=SIZES,
        size_threads=(8, 1, 4, 32), others=_PAIR, size_kinds=(_ALL, _PAIR),
    ),
    Thinness(
        threads=(1, 4, 8, 32, 128), processes=(1, 2, 4), sizes=SIZES,
        size_threads=(8, 1, 32), others=_KVIO, size_kinds=(_ALL, _KVIO),
    ),
    Thinness(
        threads=(1, 8, 32), processes=(1, 4), sizes=(64 * KiB, MiB, 16 * MiB),
        size_threads=(8, 1), others=_KVIO, size_kinds=(_ALL, _KVIO),
    ),
    Thinness(
        threads=(1, 8, 32), processes=(1, 4), sizes=(64 * KiB, 4 * MiB),
        size_threads=(8, 1), others=_KVIO, size_kinds=(_PAIR, _KVIO),
    ),
    Thinness(
        threads=(1, 8, 32), processes=(1, 4), sizes=(64 * KiB, 4 * MiB),
        size_threads=(8,), others=_KVIO, size_kinds=(_PAIR, _KVIO), read_kinds=_PAIR, objects_by=4,
    ),
)  # fmt: skip


def choose(
    parts: Sequence[str], contenders: Sequence[str], *, objects: int, budget_s: float
) -> tuple[list[Case], Thinness]:
    """Return the cases of the parts, as many as the budget has room for.

    The fullest level of which the first number of `ROUNDS_WANTED` fits, else the second, else the
    third; the least level if none fits.
    """
    for rounds in ROUNDS_WANTED:
        for thinness in LEVELS:
            cases = cases_of(parts, thinness, objects=objects)
            if rounds * sum(case.seconds(contenders) for case in cases) <= budget_s:
                return cases, thinness
    return cases, thinness


def cases_of(parts: Sequence[str], thinness: Thinness, *, objects: int) -> list[Case]:
    """Return the cases of some parts at a level."""
    reads = "get" in parts
    objects = max(1, objects // thinness.objects_by)
    cases: list[Case] = []
    if "2" in parts:
        cases.append(_case(LIBRARIES, OBJECT_NBYTES, LIBRARY_THREADS, objects))
    if reads:
        kinds = thinness.read_kinds
        cases.append(
            _case(
                READS, OBJECT_NBYTES, LIBRARY_THREADS, objects,
                operations=OPERATIONS, kinds=kinds,
            )
        )  # fmt: skip
    if "4" in parts:
        operations = OPERATIONS if reads else (PUT, GET)
        for nbytes in thinness.sizes:
            for at, threads in enumerate(thinness.size_threads):
                if threads * nbytes <= _MOST_NBYTES:
                    kinds = thinness.size_kinds[at > 0]
                    own = operations if at == 0 else (PUT, GET)
                    cases.append(
                        _case(SCALE, nbytes, threads, objects, operations=own, kinds=kinds)
                    )
    if "1" in parts:
        cases += (
            _case(THREADS, OBJECT_NBYTES, count, objects, kinds=thinness.others)
            for count in thinness.threads
        )
    if "3" in parts:
        cases += (
            _case(
                PROCESSES, OBJECT_NBYTES, PROCESS_THREADS, objects,
                processes=count, kinds=thinness.others,
            )
            for count in thinness.processes
        )  # fmt: skip
    return cases


def real_cases(objects: int) -> list[Case]:
    """Return what is measured on a real server: part 2 with reads, a tenth of the objects."""
    few = max(LIBRARY_THREADS, objects // 10)
    return [
        _case(REAL, OBJECT_NBYTES, LIBRARY_THREADS, few, operations=(PUT, *_READS), kinds=_PAIR)
    ]


def _case(
    part: str,
    nbytes: int,
    threads: int,
    objects: int,
    *,
    processes: int = 1,
    operations: tuple[str, ...] = (PUT,),
    kinds: tuple[str, ...] = _ALL,
) -> Case:
    """Make a case of as many bytes as *objects* of 322,957 bytes are, within bounds."""
    by_bytes = objects * OBJECT_NBYTES // nbytes
    wanted = max(_CALLS_OF_A_THREAD * threads, min(2 * objects, by_bytes))
    most = max(threads, _MOST_NBYTES // nbytes)
    return Case(
        part=part,
        nbytes=nbytes,
        threads=threads,
        processes=processes,
        count=max(1, min(wanted, most) // processes),
        operations=operations,
        kinds=kinds,
    )
