"""After a power cut, what had a receipt is there, and what is there is whole or known not to be.

Real file systems over a disk that keeps a log: see `replay` for how states are made, and the
package's docstring for what that needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.faults import mutants
from tests.faults.blocks import disk, workload
from tests.faults.blocks.processes import LIMIT_S, report
from tests.faults.sizes import FULL, seed, size
from tests.faults.totals import Tally

pytestmark = [pytest.mark.root, pytest.mark.slow]
#: Of each scenario. A call is a write or two of the log on XFS, where fewer disks differ.
_STATES: Final = {"xfs": size(5, 320), "btrfs": size(5, 440)}
_STATES_ELSEWHERE: Final = size(5, 420)
#: Other ways to mount ext4 are cut in all of the campaign alone.
_KINDS: Final = (*disk.CUT, *disk.CUT_TOO) if FULL else disk.CUT
#: All of the campaign is as many tests as may run side by side; the slice starts few processes.
_GROUPS: Final = [(name,) for name in workload.SCENARIOS] if FULL else [tuple(workload.SCENARIOS)]
#: Where each is seen, the clearest first. Direct I/O is no place to look for a file sync that was
#: left out: its bytes are on the disk, and the directory's sync flushes them.
_SHOWN_BY: Final = {
    "no_directory_sync": ("new", "replace", "batches", "delete", "staged", "shared"),
    "no_file_sync": ("new", "replace", "batches", "staged", "shared", "plain", "moved"),
    "rename_without_sync": ("named-new", "named-replace", "shared", "moved"),
    "no_sync": ("new", "replace", "staged", "plain"),
    "link_before_sync": ("threads", "batches", "staged"),
}
_SEEN: Final = frozenset(("lost", "torn", "wrong"))
_MUTANT_STATES: Final = size(12, 60)


def count(found: Sequence[Mapping[str, Any]], tally: Tally) -> Counter[str]:
    """Count into the line of totals; what was bad, in all."""
    bad: Counter[str] = Counter()
    for one in found:
        bad.update(one["bad"])
        tally.add(states=one["states"], receipts=one["receipts"])
    tally.add(lost=bad["lost"] + bad["unmountable"], torn=bad["torn"] + bad["wrong"])
    return bad


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("scenarios", _GROUPS, ids=lambda names: names[0] if FULL else "all")
@pytest.mark.parametrize("kind", _KINDS)
def test_what_was_durable_survives_a_power_cut(
    kind: str, scenarios: Sequence[str], server: Path, tmp_path: Path, tally: Tally
) -> None:
    """In every state of the disk: no receipt lost, no name torn, nothing but temporaries left."""
    disk.need(kind)
    states = _STATES.get(kind, _STATES_ELSEWHERE)
    found = report("cutting", tmp_path, server, kind, states, seed(), *scenarios)
    bad = count(found, tally)

    assert [one["scenario"] for one in found] == list(scenarios)
    assert all(one["states"] >= states * 3 // 4 for one in found), found
    assert all(one["receipts"] > 0 for one in found), found
    assert not FULL or "visible" not in scenarios or found[0]["reported"], "no cut tore anything"
    assert not bad, "\n".join(line for one in found for line in one["examples"])


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("mutant", _SHOWN_BY)
@pytest.mark.parametrize("kind", disk.FILESYSTEMS)
def test_a_broken_protocol_is_caught(
    kind: str, mutant: str, server: Path, mutant_library: Path, tmp_path: Path, tally: Tally
) -> None:
    """A protocol that leaves out a sync loses receipts or tears names, and that is seen."""
    disk.need(kind)
    more = mutants.environment(mutant_library, mutant)
    scenarios = _SHOWN_BY[mutant] if FULL else _SHOWN_BY[mutant][:1]
    arguments = (tmp_path, server, kind, _MUTANT_STATES, seed(), *scenarios)
    found = report("cutting", *arguments, more=more)
    missed = [one["scenario"] for one in found if not set(one["bad"]) & _SEEN]

    tally.add(mutants=len(found), caught=len(found) - len(missed))
    assert not missed, f"{mutant} was not caught on {kind} by {missed}"


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("scenario", ["new", "replace", "staged"])
@pytest.mark.parametrize("kind", ["ext4-nojournal", "ext2"])
def test_taking_a_file_system_for_one_with_a_journal_is_caught(
    kind: str, scenario: str, server: Path, tmp_path: Path, tally: Tally
) -> None:
    """Without a journal a durable block that is synced before it has a name is lost, and seen."""
    disk.need(kind)
    more = {workload.ASSUME_JOURNAL: "1"}
    (found,) = report(
        "cutting", tmp_path, server, kind, _MUTANT_STATES, seed(), scenario, more=more
    )

    tally.add(mutants=1, caught=int(bool(set(found["bad"]) & _SEEN)))
    assert set(found["bad"]) & _SEEN, f"not caught on {kind}: {found}"
