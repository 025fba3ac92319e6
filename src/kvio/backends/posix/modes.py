"""The decisions of a policy as numbers of the C core, cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from kvio._native import lib
from kvio.policies import Decision
from kvio.types import IOMode

_NUMBERS: Final = {
    (IOMode.BUFFERED, False): lib.KVIO_MODE_BUFFERED,
    (IOMode.DONTCACHE, False): lib.KVIO_MODE_DONTCACHE,
    (IOMode.DIRECT, False): lib.KVIO_MODE_DIRECT,
    (IOMode.DIRECT, True): lib.KVIO_MODE_DIRECT_IF_COLD,
}
#: The mode of calls that transfer no payload.
LOOK: Final[int] = lib.KVIO_MODE_BUFFERED
#: Modes that may need a bounce buffer.
BOUNCING: Final = frozenset((lib.KVIO_MODE_DIRECT, lib.KVIO_MODE_DIRECT_IF_COLD))

#: The number of a mode, and the reason for it.
Choice: TypeAlias = tuple[int, str]
#: Chooses by size in bytes and number of calls in flight.
Chooser: TypeAlias = Callable[[int, int], Choice]


def chooser(decide: Callable[[int, int], Decision]) -> Chooser:
    """Return a cached version of a policy's decision."""

    @lru_cache(maxsize=4096)
    def choose(nbytes: int, concurrency: int) -> Choice:
        decision = decide(nbytes, concurrency)
        return _NUMBERS[decision.mode, decision.unless_hot], decision.reason

    return choose


def choose_all(
    choose: Chooser, sizes: Sequence[int], concurrency: int
) -> tuple[list[int], list[str]]:
    """Choose for every block of a batch; return the modes, or one for all, and the reasons."""
    by_size = {nbytes: choose(nbytes, concurrency) for nbytes in set(sizes)}
    if len(set(by_size.values())) == 1:
        ((mode, reason),) = set(by_size.values())
        return [mode], [reason] * len(sizes)
    return [by_size[nbytes][0] for nbytes in sizes], [by_size[nbytes][1] for nbytes in sizes]
