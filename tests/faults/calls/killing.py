"""A process that lets broken variants of kvio be killed and says what was noticed: ``python -m``.

Each variant is what the C library of `shim.c` makes of the core; beside each the same kills are
tried with one that does not lie.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import kvio
from tests.faults.calls import test_deaths, test_moments
from tests.faults.calls.test_sites import make_root
from tests.faults.sizes import seed, size
from tests.posix.scenarios import SCENARIOS
from tests.sharedfile.kills import CASES
from tests.sharedfile.kills import test_moments as lives
from tests.sharedfile.kills.test_calls import LIVES, calls_of

#: Kills at random moments until a broken variant must have been noticed; most take one or two.
MOST: Final = 60
#: Kills, and calls to be killed at, of the one that is not broken.
FEW: Final = size(2, 20)
HONEST: Final = "none"
BUFFERED: Final = CASES[0]


def at_moments(name: str) -> Callable[[Path, str], Iterator[None]]:
    """Kill the process of one of the works at random moments."""
    work = next(work for work in test_moments.WORKS if work.name == name)

    def kills(root: Path, lie: str) -> Iterator[None]:
        def turn(store: kvio.Store, version: int, say: Callable[..., None]) -> None:
            os.environ["KVIO_LIE"] = lie
            work.turn(store, version, say)

        dice, reported = random.Random(seed()), []
        for number in range(MOST):
            reported += test_moments.kill(work._replace(turn=turn), root, number * 100_000, dice)
            test_moments.check(work, root, reported)
            yield

    return kills


def at_calls(name: str) -> Callable[[Path, str], Iterator[None]]:
    """Kill a process at the calls of a scenario."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)

    def kills(root: Path, lie: str) -> Iterator[None]:
        todo = test_deaths.calls(scenario, root)
        for site, nth in random.Random(seed()).sample(todo, len(todo)):
            test_deaths.die(scenario, root, site, nth, lie)
            yield

    return kills


def in_a_life(root: Path, lie: str) -> Iterator[None]:
    """Kill a process at the calls of a shared file's life that are not writes."""
    todo = [call for call in calls_of(LIVES[0], BUFFERED, root) if call[0] != "write"]
    for number, (site, nth) in enumerate(random.Random(seed()).sample(todo, len(todo))):
        seal = number % 2 == 1
        test_deaths.die_in_life(LIVES[0], BUFFERED, root / "f", site, nth, seal=seal, lie=lie)
        yield


def creators(root: Path, lie: str) -> Iterator[None]:
    """Kill creators of shared files at random moments."""
    lives.KILLS = 1
    for number in range(MOST):
        lives._SEED = seed() + number
        turn = root / str(number)
        turn.mkdir()
        os.environ["KVIO_LIE"] = lie
        try:
            lives.test_a_creator_that_is_killed_tears_nothing(BUFFERED, turn)
        finally:
            os.environ["KVIO_LIE"] = HONEST
        yield


class Variant(NamedTuple):
    """A lie, and the kills that show it."""

    lie: str
    where: str
    kills: Callable[[Path, str], Iterator[None]]


VARIANTS: Final = (
    Variant("copied-to-its-name", "single blocks", at_moments("single blocks")),
    Variant("renames-come-late", "batches", at_moments("batches")),
    Variant("deletions-come-late", "deletions", at_moments("deletions")),
    Variant("written-under-its-name", "creators of shared files", creators),
    Variant("named-before-the-last-write", "calls of a write", at_calls("write durable")),
    Variant("named-before-the-last-write", "calls of a replace", at_calls("replace")),
    Variant("named-before-the-last-write", "calls of a batch", at_calls("batch")),
    Variant("named-before-the-last-write", "calls of a shared file's life", in_a_life),
)


def noticed(variant: Variant, root: Path, lie: str, most: int) -> str:
    """Kill until something is noticed: what, and after how many kills; empty: nothing was."""
    done = 0
    try:
        for done, _ in enumerate(variant.kills(root, lie), 1):
            if done == most:
                break
    except (AssertionError, struct.error, kvio.KvioError) as exc:
        seen_by = traceback.extract_tb(exc.__traceback__)[-1].name
        return f"after {done} kills, by {seen_by}: {exc!s:.200}"
    return ""


def main() -> None:
    """Report for every variant what the checks found, and for the unbroken one."""
    parent = Path(sys.argv[1])
    found = {}
    for number, (variant, honest) in enumerate(product(VARIANTS, (False, True))):
        root = make_root(parent, f"r{number}")
        lie, most = (HONEST, FEW) if honest else (variant.lie, 1 << 20)
        found[f"{variant.where}: {lie}"] = noticed(variant, root, lie, most)
    # The last line: the tests that are called here print as well.
    print(json.dumps(found))


if __name__ == "__main__":
    main()
