"""The table of failures holds for a library that knows one server in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.s3.failing import error_of, registered
from tests.s3.test_failures import HANGING, TABLE, expected
from tests.s3.test_failures_of_writes import STEPS

LIBRARY: Final = "s3+s3dlio"
PACES: Final = {"patient": [w for w in TABLE if w not in HANGING], "brisk": list(HANGING)}
HEALING: Final = (
    *("e500", "e503", "reset", "resetmid", "trunc"),
    *("part-e500", "part-reset", "complete-e500", "completeerror", "lostpart"),
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIO_TEST_ALONE", "1")
    registered(LIBRARY)


def found_out(what: str, *words: str) -> Any:
    """Run a separate process and return its result; fail if it exceeds its timeout."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.s3.alone", LIBRARY, what, *words],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("pace", PACES)
def test_a_fault_is_the_same_error_in_a_separate_process(pace: str) -> None:
    """Each verb has the outcome in the table, and nothing is retried."""
    reported = found_out(pace, *PACES[pace])

    verbs = {word: reported["outcomes"][word] for word in PACES[pace]}
    assert verbs == {word: expected(LIBRARY, word, verbs[word]) for word in verbs}
    assert reported["retries"] == 0
    assert reported["again"] == []


def test_a_failed_upload_leaves_nothing_in_a_separate_process() -> None:
    """Whichever step fails, there is no receipt and no object, and the upload is aborted."""
    reported = found_out("uploads", *STEPS)

    assert reported["outcomes"] == {word: error_of(STEPS[word]) for word in STEPS}
    assert reported["left"] == []
    assert reported["unfinished"] == []


def test_a_retry_recovers_in_a_separate_process() -> None:
    """Kvio retries a transient error, counts the retry, and returns the whole block."""
    reported = found_out("healing", *HEALING)

    outcomes = {
        (word, verb): how for word in HEALING for verb, how in reported["outcomes"][word].items()
    }
    assert {case for case, (outcome, _) in outcomes.items() if outcome != "good"} == set()
    assert reported["broken"] == []
    assert reported["unfinished"] == []
    unharmed = {("resetmid", "write"), ("trunc", "write")}
    assert {case for case, (_, retries) in outcomes.items() if not retries} == unharmed
