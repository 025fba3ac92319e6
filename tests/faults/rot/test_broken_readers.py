"""The campaign finds readers that look past something, each of them.

Most need a C compiler (Debian package gcc): they are built from the C core's own sources.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio.staging import files
from tests.faults.rot import mutants
from tests.faults.rot.campaign import Campaign
from tests.faults.rot.damage import Patient
from tests.faults.rot.one_block import KEY
from tests.faults.sizes import seed
from tests.faults.totals import Tally
from tests.posix import faultlab


def campaign(source: Path, number: int | None, root: Path) -> dict[str, Any]:
    """Run the campaign on one of the readers."""
    root.mkdir(mode=0o700)
    reported: dict[str, Any] = json.loads(
        mutants.run(source, "tests.faults.rot.one_block", number, str(root))
    )
    assert Path(reported["core"]).is_relative_to(source), "it was not the core that was built"
    return reported


@pytest.mark.slow
def test_every_broken_reader_is_found(tmp_path: Path, tally: Tally) -> None:
    """Of the sound reader nothing is said; each broken one lets something through that is seen."""
    source = mutants.build(tmp_path / "broken")
    sound = campaign(source, None, tmp_path / "sound")
    assert (sound["missed"], sound["flips"] > 700) == ([], True)

    tally.add(mutants=len(mutants.MUTANTS))
    found = {}
    for number, name in enumerate(mutants.MUTANTS):
        found[name] = campaign(source, number, tmp_path / str(number))["missed"]
        tally.add(caught=bool(found[name]))

    assert all(found.values()), found


class _Hasty(files._Stored):
    def _check(self, view: memoryview, at: int) -> None:
        pass


class _Short(files._Stored):
    def _check(self, view: memoryview, at: int) -> None:
        if len(view) == self._stat.nbytes:
            super()._check(view, at)


#: Files over blocks of a tier's store, and how long a block shows what they look past.
FILES: Final = {
    "a file that checks no checksum": (_Hasty, 9001),
    "a file that checks what one read gives": (_Short, 3 << 20),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_over_a_block_is_found(
    name: str, quick_place: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives bytes out that rotted, and the campaign sees it."""
    tally.add(mutants=1)
    broken, nbytes = FILES[name]
    monkeypatch.setattr(files, "_Stored", broken)
    payload = faultlab.pattern(1, nbytes)
    with kvio.open_store("posix-tmpfile", root=quick_place) as store, kvio.stage(store) as tier:
        store.write_block(KEY, payload)
        with Patient(faultlab.file_of(quick_place, KEY)) as patient:
            done = Campaign(store, KEY, payload, patient, random.Random(seed()), tier)
            done.checksummed(4)

    caught = bool(done.missed) and all(": tier: open" in one for one in done.missed)
    tally.add(caught=caught)
    assert caught, done.missed
