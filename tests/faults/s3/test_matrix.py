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
from tests.faults.s3.proxy import FAULTS
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
    program = servers.GO_PROGRAMS.get(server)
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
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("pace", ["patient", "hasty"])
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_said_of_an_operation_is_true(
    library: str, server: str, pace: str, tally: Tally
) -> None:
    """Whatever goes wrong: good is whole, a receipt is of what lies there, the rest is typed."""
    told = filled(library, server, pace)

    tally.add(requests=told["requests"], faults=told["faults"], lost=0, torn=0)
    assert told["wrong"] == [], f"KVIO_FAULTS_SEED={seed()}"
    assert told["faults"]


#: Operations in which a broken backend shows, and the faults that bring it out.
SHOWS_IN: Final = {
    "ignores the length": ("body cut off", "read a range"),
    "receipt before the answer": ("500", "write"),
    "half a list is a list": ("reset in the body", "list"),
}


@pytest.mark.parametrize("library", ["s3+minio", "s3+boto3"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_backend_that_believes_too_much_is_found(
    mutant: str, library: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says of something that it went well, and the matrix sees that it did not."""
    require(library)
    fault, operation = SHOWS_IN[mutant]
    cells = [(one, operation) for one in FAULTS if one.name == fault]
    monkeypatch.setattr(matrix, "sampled", lambda *_: cells)
    monkeypatch.setattr(matrix, "FULL", False)

    after = 1 if operation == "read a range" else 0  # the trailer comes well
    turns = [(False, after)]
    told = matrix.run(library, "s3mem", "patient", turns=turns, mutant=mutant)

    tally.add(mutants=1, caught=bool(told["wrong"]))
    assert told["wrong"]
    assert matrix.run(library, "s3mem", "patient", turns=turns)["wrong"] == []
