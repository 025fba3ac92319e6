"""A plugin of child runs: stores publish as they can, and how each test ended is written down.

``-p tests.faults.without.outcomes``, with the path of the file in ``KVIO_OUTCOMES``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.skips import reason_of

VARIABLE: Final = "KVIO_OUTCOMES"
#: Set: stores publish by O_TMPFILE alone, as the variants of the suite have it.
STUBBORN: Final = "KVIO_OUTCOMES_STUBBORN"
#: What the files lie on, for tests that cannot ask /proc.
FILESYSTEM: Final = "KVIO_OUTCOMES_FILESYSTEM"
_found: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:  # noqa: ARG001  # pytest's own names
    """Let the variants of the suite ask for whatever way to publish there is."""
    from tests.media import Variant

    plain = Variant.url

    filesystem = os.environ[FILESYSTEM]

    def url(self: Variant, root: Path, **options: object) -> str:
        publish = "auto" if self.publish == "tmpfile" else self.publish
        trust = {"trust_fsync": "true"} if filesystem.startswith("fuse") else {}
        return plain(self, root, **{"publish": publish, **trust, **options})

    if STUBBORN not in os.environ:
        Variant.url = url  # type: ignore[method-assign]  # a run of its own
    if not os.path.exists("/proc/self"):  # the tests' own look, not kvio's
        for module in (sys.modules[name] for name in ("tests.conftest", "tests.media")):
            module.filesystem_of = lambda _: filesystem  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how a test ended: a failure before or after it counts too."""
    if report.failed:
        _found[report.nodeid] = f"failed: {str(report.longrepr)[-1500:]}"
    elif report.skipped:
        _found.setdefault(report.nodeid, f"skipped: {reason_of(report)}")
    elif report.when == "call":
        _found.setdefault(report.nodeid, "passed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write it down, where all of it is known."""
    config: Any = session.config
    if not hasattr(config, "workerinput"):
        Path(os.environ[VARIABLE]).write_text(json.dumps(_found))
