"""The end of a run: one line of totals, and a file of them where one is asked for."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from tests.faults import sizes, totals
from tests.skips import reason_of

#: Where the totals are written as JSON.
VARIABLE: Final = "KVIO_FAULTS_RESULTS"
_FOLDER: Final = "tests/faults/"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Print what the tests of the campaign did, of all workers together."""
    reports = [one for many in terminalreporter.stats.values() for one in many]
    counted = [
        value
        for one in reports
        if getattr(one, "when", None) == "teardown"
        for name, value in one.user_properties
        if name == totals.PROPERTY
    ]
    if not counted:
        return
    total = totals.summed(counted)
    skipped = Counter(
        reason_of(one)
        for one in terminalreporter.stats.get("skipped", [])
        if _FOLDER in one.nodeid or not one.nodeid.startswith("tests/")
    )
    broken = [one for many in ("failed", "error") for one in terminalreporter.stats.get(many, [])]
    failed = sum(_FOLDER in one.nodeid or not one.nodeid.startswith("tests/") for one in broken)
    terminalreporter.write_line(f"faults: {totals.line(total, skipped, failed)}")
    if sizes.FULL:
        for one in totals.below(total):
            terminalreporter.write_line(f"faults: less than all of the campaign: {one}")
    if path := os.environ.get(VARIABLE):
        totals.write(
            Path(path),
            total,
            skipped,
            size="full" if sizes.FULL else "slice",
            failed=failed,
            seed=sizes.seed(),
            kernel=platform.release(),
            date=time.strftime("%Y-%m-%d"),
            status=int(exitstatus),
        )
