"""Child processes of the tests, which mount what they need in namespaces of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[3]
#: No test of all of the campaign takes longer.
LIMIT_S: Final = 3600


def report(
    module: str,
    *arguments: object,
    more: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run a module of this package, and yield what it prints, line by line.

    Args:
        module: its name.
        arguments: its command line.
        more: added to its environment.
        under: a command line to put before it.
    """
    command = [
        *under,
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        f"tests.faults.blocks.{module}",
        *map(str, arguments),
    ]
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env={**os.environ, **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            said, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()  # its mounts go with it
    assert process.returncode == 0, f"{module} ended with {process.returncode}:\n{errors}"
    return [json.loads(line) for line in said.splitlines()]
