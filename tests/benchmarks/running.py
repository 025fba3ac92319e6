"""Run ``python -m benchmarks`` as a user does, from any directory."""

from __future__ import annotations

import os
import subprocess
from typing import Final

from benchmarks.harness.workers import module_command

COMMAND: Final = module_command("benchmarks")


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run it to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "COLUMNS": "80", **environment},
        timeout=280,
        check=False,
    )
