"""A guest that runs to its end, and what it saw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guest import boot


@dataclass(frozen=True, slots=True)
class Seen:
    """What a guest reported.

    Attributes:
        lines: what it saw or how it failed, by the name of the case.
        console: what its kernel and its programs printed.
    """

    lines: dict[str, dict[str, Any]]
    console: str

    def __getitem__(self, case: str) -> Any:
        """Return what was seen; fail with what went wrong in the guest."""
        reported = self.lines.get(case)
        if reported is None:
            pytest.fail(f"the guest said nothing of {case}; its console:\n{self.console}")
        if "error" in reported:
            pytest.fail(f"in the guest:\n{reported['error']}", pytrace=False)
        return reported["seen"]


def see(work: Path, module: str, images: Sequence[Path], *arguments: str) -> Seen:
    """Run a guest whose program is *module* until it ends."""
    with boot.Guest(work, module, arguments, disks=images) as guest:
        reported = [json.loads(line) for line in guest.lines()]
        console = guest.console
    for image in images:
        image.unlink()
    return Seen({one["name"]: one for one in reported}, console)
