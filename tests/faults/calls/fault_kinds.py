"""The ways in which a system call fails in the campaign, and counting calls without any."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvio._native import faults
from tests.posix.test_syscall_faults import ERRORS, FOR_EVER, TRANSFERS, Fault

#: Sites that move bytes: their calls can be cut short.
TRANSFERRING: Final = ("read", "write")


@contextmanager
def counted() -> Iterator[Callable[[], dict[str, int]]]:
    """Count calls by site; the yielded function reports how many so far."""
    with faults.inject("read", nth=1 << 30) as fault:
        yield lambda: {name: fault.seen[number] for name, number in faults.sites().items()}


def kind_of(fault: Fault) -> str:
    """Name a fault's column in the table."""
    if fault.transfer is None:
        return errno.errorcode[fault.error]
    return {faults.HALF: "half", 0: "0 bytes", 1: "1 byte"}[fault.transfer]


def kinds_at(site: str) -> Iterator[tuple[int, int | None]]:
    """Yield errno and transfer of every way in which a call of a site fails."""
    for error in ERRORS:
        yield error, None
    if site in TRANSFERRING:
        for transfer in TRANSFERS:
            yield 0, transfer


def faults_at(site: str, nth: int) -> Iterator[Fault]:
    """Yield every way in which one call of a site fails."""
    for error, transfer in kinds_at(site):
        yield Fault(site, nth, error, transfer)


def every_cell() -> set[tuple[str, str]]:
    """Return the cells of the table: every site, failing in every way."""
    return {(site, kind_of(fault)) for site in faults.sites() for fault in faults_at(site, 1)}


def every_fault(calls: dict[str, int], most: int) -> Iterator[Fault]:
    """Fail the first *most* calls of every site and its last, once, and the first for ever."""
    for site, seen in calls.items():
        for nth in sorted({*range(1, min(seen, most) + 1), *([seen] if seen else [])}):
            yield from faults_at(site, nth)
        if seen:
            yield Fault(site, 1, errno.EIO, None, FOR_EVER)
