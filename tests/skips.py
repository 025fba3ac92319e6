"""A budget of skips, for runs that ask for one: what skips more, or for a new reason, is an error.

`KVIO_SKIPS` names the file of limits, as tests/skips.toml: each reason, or how it begins, with the
most tests that may skip for it. A test that skips because it needs root must be marked so, or the
part of `.ci/run` that runs as root leaves it out too.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

#: The file of limits; a run without it has none.
VARIABLE = "KVIO_SKIPS"
_ROOT = "needs root"
#: Workers need it not, and tests that run pytest themselves must not have it.
_file = os.environ.pop(VARIABLE, None)


def reason_of(report: Any) -> str:
    """Return the reason of a skip."""
    *_, reason = report.longrepr
    return str(reason).removeprefix("Skipped: ")


def excesses(reports: Iterable[Any], limits: Mapping[str, int]) -> list[str]:
    """Return what skips beyond the limits, one line per reason; the longest that fits holds."""
    counts: Counter[str] = Counter()
    found = []
    for report in reports:
        reason = reason_of(report)
        fitting = [known for known in limits if reason.startswith(known)]
        counts[max(fitting, key=len, default=reason)] += 1
        if reason.startswith(_ROOT) and "root" not in report.keywords:
            found.append(f"{report.nodeid} needs root and is not marked `root`")
    for reason, count in sorted(counts.items()):
        most = limits.get(reason, 0)
        if count > most:
            found.append(f"{count} skipped, {most} allowed: {reason}")
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Make an error of what is beyond the limits: in the summary, its last line and the status."""
    if not _file:
        return
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    limits = tomllib.loads(Path(_file).read_text())["most"]
    for line in excesses(reporter.stats.get("skipped", []), limits):
        report = pytest.CollectReport(_file, "failed", f"{line} (see {_file})", [])
        reporter.stats.setdefault("error", []).append(report)
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
