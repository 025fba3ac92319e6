"""The campaign finds readers that look past something, each of them.

Needs a C compiler (Debian package gcc): the readers are built from the C core's own sources.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rot import mutants
from tests.faults.totals import Tally


def campaign(source: Path, number: int | None, root: Path) -> dict[str, Any]:
    """Run the campaign on one of the readers."""
    root.mkdir(mode=0o700)
    told: dict[str, Any] = json.loads(
        mutants.run(source, "tests.faults.rot.one_block", number, str(root))
    )
    assert Path(told["core"]).is_relative_to(source), "it was not the core that was built"
    return told


@pytest.mark.slow
def test_every_broken_reader_is_found(tmp_path: Path, tally: Tally) -> None:
    """Of the sound reader nothing is said; each broken one lets something through that is seen."""
    source = mutants.build(tmp_path / "broken")
    sound = campaign(source, None, tmp_path / "sound")
    assert (sound["missed"], sound["flips"] > 700) == ([], True)

    found = {}
    for number, name in enumerate(mutants.MUTANTS):
        found[name] = campaign(source, number, tmp_path / str(number))["missed"]
        tally.add(mutants=1, caught=bool(found[name]))

    assert all(found.values()), found
