"""Objects of ``layout=block`` with bytes changed on the server are refused, by every library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio._native import crc32c
from kvio.backends.s3 import body
from kvio.format import TRAILER_BYTES, Trailer, TrailerError, unpack_trailer
from tests.faults.rot import one_object
from tests.faults.totals import Tally
from tests.s3.failing import registered
from tests.s3.libraries import LIBRARIES, require

ALONE: Final = "s3+s3dlio"
LIMIT_S: Final = 600


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_changed_byte_of_an_object_is_returned(library: str, tally: Tally) -> None:
    """Trailer, payload, length, another's block: all is refused, and what is refused is typed."""
    if library == ALONE:
        require(library)
        reported = alone(library)
    else:
        registered(library)
        reported = one_object.run(library)

    tally.add(flips=reported["flips"], detected=reported["detected"])
    assert reported["missed"] == []


def alone(library: str) -> dict[str, Any]:
    """Run the campaign of a library in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.rot.one_object", library],
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


def _any_trailer(end: bytes, *, total: int, namespace: str, key: str) -> Trailer:
    del namespace, key
    return Trailer(max(0, total - TRAILER_BYTES), None, end[24:40])


def _any_key(end: bytes, *, total: int, namespace: str, key: str) -> Trailer:
    del namespace
    try:
        return unpack_trailer(end, stored_nbytes=total, expected_key_hash=end[24:40], crc32c=crc32c)
    except TrailerError as exc:
        raise kvio.CorruptBlockError(str(exc), key=key) from None


def _no_check(*_: object) -> None:
    pass


#: What a broken reader does instead.
MUTANTS: Final = {
    "trusts any trailer": ("parse", _any_trailer),
    "skips the hash of the key": ("parse", _any_key),
    "checks the length only": ("check_payload", _no_check),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_reader_of_objects_is_found(
    name: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that looks past something lets something through, and the campaign sees it."""
    library = "s3+boto3"
    registered(library)
    attribute, broken = MUTANTS[name]
    monkeypatch.setattr(body, attribute, broken)

    missed = one_object.run(library, much=False)["missed"]

    tally.add(mutants=1, caught=bool(missed))
    assert missed
