"""Which loads DLIO generates: the parts of `plan`, each load once, fewer as time is short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvio import KiB, MiB
from kvio.experiments.plot import size_text
from kvio.experiments.s3.order import LIBRARIES, PUT
from kvio.experiments.s3.plan import LEVELS, PARTS, Case, Thinness, cases_of, real_cases

#: Parts that only put, which is what generation does.
GENERATED: Final = tuple(part for part in PARTS if part != "get")
#: DLIO's format by the payload asked for.
FORMATS: Final = {"random": "npy", "jpeg": "jpeg"}
#: DLIO on its own storage, a directory in memory: start and generation, and nothing stored.
STOCK: Final = "stock"
#: Through DLIO, and by the direct harness.
KINDS: Final = ("dlio", "kvio")
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (STOCK, *(f"{library} {kind}" for library in LIBRARIES for kind in KINDS))

_NPY_HEADER_NBYTES: Final = 128
#: Of DLIO's JPEGs of noise, by Pillow at its own quality: by pixel, where its blocks are whole.
_JPEG_NBYTES: Final = 0.5557
_JPEG_BLOCK: Final = 8
#: A run's seconds beside its bytes, on two cores: one rank, and each further.
_START_S: Final = 3.0
_RANK_S: Final = 1.6
_BYTES_PER_S: Final = 120e6
#: Objects so small wait for acknowledgements in torch, each so long.
_SMALL_NBYTES: Final = 128 * KiB
_WAIT_S: Final = 0.04
_ROUNDS_WANTED: Final = 3
_WHOLE: Final = LEVELS[0]
#: From everything to the least; fewer objects would not shorten what is mostly DLIO starting.
DLIO_LEVELS: Final = (
    _WHOLE,
    replace(_WHOLE, threads=(1, 8, 32, 128), processes=(1, 2, 4), size_threads=(8, 1, 32)),
    replace(
        _WHOLE, threads=(1, 8, 32), processes=(1, 2, 4), sizes=(64 * KiB, MiB, 16 * MiB),
        size_threads=(8, 1),
    ),
    replace(
        _WHOLE, threads=(1, 8, 32), processes=(1, 4), sizes=(64 * KiB, 4 * MiB), size_threads=(8,)
    ),
    replace(
        _WHOLE, threads=(8, 32), processes=(1, 2), sizes=(64 * KiB, 4 * MiB), size_threads=(8,)
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What DLIO generates and the direct harness puts.

    Attributes:
        case: as the direct harness takes it; its objects are as long as DLIO makes them.
        parts: all that it belongs to: with 32 threads, parts 1 and 2.
        format: DLIO's.
    """

    case: Case
    parts: tuple[str, ...]
    format: str

    def __str__(self) -> str:
        return f"{self.case.subject}, {size_text(self.case.nbytes)}"

    @property
    def objects(self) -> int:
        """Count the objects of all processes."""
        return self.case.count * self.case.processes

    @property
    def record_length(self) -> int:
        """Give what DLIO is asked for: the pixels, or bytes, of a square."""
        return side_of(self.format, self.case.nbytes) ** 2

    def seconds(self, libraries: Sequence[str]) -> float:
        """Estimate how long a round takes."""
        case, once = self.case, start_s(self.case.processes)
        moved = self.objects * case.nbytes / _BYTES_PER_S
        waits = self.objects * _WAIT_S / (case.threads * case.processes)
        slow = waits if "torch" in libraries and case.nbytes < _SMALL_NBYTES else 0.0
        direct = case.seconds([f"{library} kvio" for library in libraries])
        return (len(libraries) + 1) * (once + moved) + slow + direct


def start_s(ranks: int) -> float:
    """Estimate how long a run takes that generates nothing."""
    return _START_S + (ranks - 1) * _RANK_S


def side_of(form: str, nbytes: int) -> int:
    """Give the side of the square whose file is as near to *nbytes* as DLIO can make it.

    DLIO makes squares of `int(sqrt(record_length))`. An .npy of one is its bytes and a header; a
    JPEG of noise is as long as its blocks of eight by eight are many, within 1 % of what is said.
    """
    if form == "npy":
        return max(1, round(math.sqrt(max(0, nbytes - _NPY_HEADER_NBYTES))))
    return max(1, round(math.sqrt(nbytes / _JPEG_NBYTES) / _JPEG_BLOCK)) * _JPEG_BLOCK


def object_nbytes(form: str, nbytes: int) -> int:
    """Give the length of DLIO's objects: of an .npy exactly, of JPEGs what is asked for."""
    return side_of(form, nbytes) ** 2 + _NPY_HEADER_NBYTES if form == "npy" else nbytes


def choose(
    parts: Sequence[str],
    libraries: Sequence[str],
    *,
    form: str,
    objects: int,
    most_ranks: int,
    budget_s: float,
) -> tuple[list[Load], Thinness]:
    """Give the loads of the parts, as many as the budget has room for.

    The first of these that fits: everything thrice, a little thrice, a little once.
    """
    for rounds in (_ROUNDS_WANTED, 1):
        for thinness in DLIO_LEVELS:
            loads = loads_of(parts, thinness, form=form, objects=objects, most_ranks=most_ranks)
            starts = sum(map(start_s, {load.case.processes for load in loads}))
            once = starts + sum(load.seconds(libraries) for load in loads)
            if rounds * once <= budget_s:
                return loads, thinness
    return loads, thinness


def loads_of(
    parts: Sequence[str], thinness: Thinness, *, form: str, objects: int, most_ranks: int
) -> list[Load]:
    """Give each load of some parts once, with all parts that it belongs to."""
    wanted = [part for part in parts if part in GENERATED]
    found: dict[tuple[int, ...], Load] = {}
    for case in cases_of(wanted, thinness, objects=objects):
        if case.processes > most_ranks:
            continue
        load = _load(case, form)
        key = (load.case.nbytes, case.threads, case.processes, case.count)
        if key in found:
            load = replace(found[key], parts=(*found[key].parts, *load.parts))
        found[key] = load
    return list(found.values())


def real_loads(form: str, objects: int) -> list[Load]:
    """Give what is generated onto a real server."""
    return [_load(case, form) for case in real_cases(objects)]


def _load(case: Case, form: str) -> Load:
    """Make a load of a case: only puts, by kvio."""
    nbytes = object_nbytes(form, case.nbytes)
    return Load(
        case=replace(case, nbytes=nbytes, operations=(PUT,), kinds=("kvio",)),
        parts=(case.part,),
        format=form,
    )
