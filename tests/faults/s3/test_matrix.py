"""Library by fault by operation, at a proxy of our own before a server that checks everything.

The server is the project's own in memory, which compares signatures and checksums; with all of the
campaign MinIO and versitygw too, where they are built (``python -m tests.s3.servers minio``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.faults.s3 import matrix
from tests.faults.s3.broken import MUTANTS
from tests.faults.s3.faults import FAULTS, HANGING, Fault
from tests.faults.sizes import FULL, seed
from tests.faults.totals import Tally
from tests.s3 import servers
from tests.s3.libraries import LIBRARIES, require

#: Of these a process can have one store only, or one set of timeouts.
ALONE: Final = ("s3+s3dlio",)
LIMIT_S: Final = 900
SERVERS: Final = ("s3mem", "minio", "versitygw") if FULL else ("s3mem",)


def filled(library: str, server: str, pace: str) -> dict[str, Any]:
    """Run a matrix here, or in a process of its own."""
    require(library)
    program = servers.PROGRAMS.get(server)
    if program is not None and not program.binary.exists():
        pytest.skip(f"{server} is not built (python -m tests.s3.servers {server})")
    if library not in ALONE:
        return matrix.run(library, server, pace)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.s3.matrix", library, server, pace],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "KVIO_TEST_ALONE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    reported: dict[str, Any] = json.loads(ended.stdout)
    return reported


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("pace", ["patient", "hasty"])
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_said_of_an_operation_is_true(
    library: str, server: str, pace: str, tally: Tally
) -> None:
    """Whatever goes wrong: good is whole, a receipt is of what lies there, the rest is typed."""
    reported = filled(library, server, pace)

    count(tally, reported)
    assert reported["wrong"] == [], f"KVIO_FAULTS_SEED={seed()}"
    assert sum(reported["met"].values())
    if FULL:
        of_pace = {f.name for f in FAULTS if (f.name in HANGING) == (pace == "hasty")}
        assert of_pace - {name for name, times in reported["met"].items() if times} == set()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_clock_that_is_wrong_denies_access_and_nothing_else(library: str, tally: Tally) -> None:
    """Where clocks differ by 20 minutes each operation is denied, once, and nothing is stored."""
    reported = filled(library, "s3mem", "skewed")

    count(tally, reported)
    assert reported["wrong"] == []
    assert reported["met"]["clock skew"]


def count(tally: Tally, reported: dict[str, Any]) -> None:
    """Count what a matrix has reported."""
    tally.add(
        requests=reported["requests"],
        faults=sum(reported["met"].values()),
        lost=reported["lost"],
        torn=reported["torn"],
    )


#: Operations in which a broken backend shows, the faults that bring it out, and in which turn.
SHOWS_IN: Final = {
    "ignores the length": ("body cut off", "read a range", (False, 1)),  # the trailer comes well
    "receipt before the answer": ("500", "write", (False, 0)),
    "half a list is a list": ("reset in the body", "list", (False, 0)),
    "a lost page is the end": ("reset in the body", "list pages", (False, 1)),
    "gives nothing up": ("body changed on the way up", "write in parts", (False, 0)),
    "checks no payload": ("body changed on the way down", "read", (False, 0)),
    "asks again whatever it was": ("answer lost", "write what is new", (True, 0)),
}


BROKEN: Final = ("s3+minio", "s3+boto3")


def cell_of(mutant: str) -> tuple[list[tuple[Fault, str]], tuple[bool, int]]:
    """Return the one cell in which a mutant shows, and its turn."""
    fault, operation, turn = SHOWS_IN[mutant]
    return [(one, operation) for one in FAULTS if one.name == fault], turn


@pytest.mark.parametrize("library", BROKEN)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_backend_that_trusts_too_much_is_found(
    mutant: str, library: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says of something that it went well, and the matrix sees that it did not."""
    require(library)
    tally.add(mutants=1)
    cells, turn = cell_of(mutant)
    monkeypatch.setattr(matrix, "cells_of", lambda *_: cells)

    reported = matrix.run(library, "s3mem", "patient", turns=[turn], mutant=mutant)

    assert reported["wrong"]
    tally.add(caught=1)


@pytest.mark.parametrize("library", BROKEN)
def test_a_sound_backend_is_not_found(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cells that show the broken ones there is nothing wrong with it."""
    require(library)
    cells: dict[tuple[bool, int], list[tuple[Fault, str]]] = {}
    for mutant in MUTANTS:
        own, turn = cell_of(mutant)
        cells.setdefault(turn, []).extend(own)
    monkeypatch.setattr(matrix, "cells_of", lambda turn, _: cells[turn])

    reported = matrix.run(library, "s3mem", "patient", turns=list(cells))

    assert reported["wrong"] == []
    assert sum(reported["met"].values()) >= len(MUTANTS)
