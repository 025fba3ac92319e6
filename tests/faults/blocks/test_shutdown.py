"""A file system that stops while it is written to: errors from then on, and every receipt kept."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.faults import mutants
from tests.faults.blocks import disk
from tests.faults.blocks.processes import LIMIT_S, report
from tests.faults.sizes import FULL, seed, size
from tests.faults.totals import Tally

pytestmark = [pytest.mark.root, pytest.mark.slow]
#: btrfs has no such ioctl.
_FILESYSTEMS: Final = ("ext4", "xfs")
_ROUNDS: Final = size(1, 4)
_CYCLES: Final = size(20, 260)
_MUTANT_CYCLES: Final = size(8, 40)
#: Ways to write, each stopped before each of its calls.
_STEPPED: Final = ("tmpfile", "shared", "named", "direct", "plain")
_FEWEST_STEPS: Final = 12
_STEPPER: Final = Path(__file__).with_name("stepper.c")
#: Those that lose something where a journal in memory is dropped, and ways to write that show it.
_SHOWN_BY: Final = {
    "no_directory_sync": "tmpfile",
    "no_file_sync": "tmpfile",
    "rename_without_sync": "named",
    "no_sync": "tmpfile",
}


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("number", range(_ROUNDS))
@pytest.mark.parametrize("kind", _FILESYSTEMS)
def test_what_was_durable_survives_a_shutdown(
    kind: str, number: int, tmp_path: Path, tally: Tally
) -> None:
    """Every receipt is kept; every call that begins after the stop fails with a typed error."""
    disk.need(kind)
    (found,) = report("stopping", tmp_path, kind, _CYCLES, 1000 * seed() + number)
    bad = found["bad"]
    tally.add(shutdowns=found["states"], receipts=found["receipts"])
    tally.add(lost=bad.get("lost", 0) + bad.get("unmountable", 0))
    tally.add(torn=bad.get("torn", 0) + bad.get("wrong", 0))

    assert found["states"] == _CYCLES
    assert not FULL or all(found["ways"].values())
    assert not bad, "\n".join(found["examples"])


@pytest.fixture(scope="module")
def stepper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile what stops a file system before the n-th call."""
    target = tmp_path_factory.mktemp("stepper") / "stepper.so"
    return mutants.compile_c(_STEPPER, target, "-shared", "-fPIC")


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("kind", _FILESYSTEMS)
def test_a_shutdown_before_any_call_loses_no_receipt(
    kind: str, stepper: Path, tmp_path: Path, tally: Tally
) -> None:
    """Before each sync, link, rename, removal and write in turn: no receipt that is not kept.

    The sync of a directory of XFS says 0 after a shutdown: a receipt must not rest on it alone.
    """
    disk.need(kind)
    ways = _STEPPED if FULL else _STEPPED[:2]
    (found,) = report("stepping", tmp_path, kind, *ways, more={"LD_PRELOAD": str(stepper)})
    bad = found["bad"]
    tally.add(shutdowns=sum(found["steps"].values()), receipts=found["receipts"])
    tally.add(lost=bad.get("lost", 0), torn=bad.get("torn", 0) + bad.get("wrong", 0))

    assert all(steps > _FEWEST_STEPS for steps in found["steps"].values()), found["steps"]
    assert not bad, "\n".join(found["examples"])


@pytest.mark.parametrize("mutant", _SHOWN_BY)
@pytest.mark.parametrize("kind", _FILESYSTEMS)
def test_a_broken_protocol_is_caught_by_a_shutdown(
    kind: str, mutant: str, mutant_library: Path, tmp_path: Path, tally: Tally
) -> None:
    """A protocol that leaves out a sync loses receipts or tears names, and that is seen."""
    disk.need(kind)
    more = mutants.environment(mutant_library, mutant)
    (found,) = report(
        "stopping", tmp_path, kind, _MUTANT_CYCLES, seed(), _SHOWN_BY[mutant], more=more
    )
    caught = found["bad"].get("lost", 0) + found["bad"].get("torn", 0)

    tally.add(mutants=1, caught=int(caught > 0))
    assert caught, f"{mutant} was not caught on {kind} in {found['states']} cycles"


@pytest.mark.parametrize("kind", _FILESYSTEMS)
def test_a_missing_sync_of_a_directory_is_caught_before_some_call(
    kind: str, stepper: Path, mutant_library: Path, tmp_path: Path, tally: Tally
) -> None:
    """Stopped before each call in turn, a store that does not sync directories loses receipts."""
    disk.need(kind)
    more = mutants.environment(mutant_library, "no_directory_sync")
    more["LD_PRELOAD"] += f":{stepper}"
    (found,) = report("stepping", tmp_path, kind, "tmpfile", more=more)
    caught = found["bad"].get("lost", 0)

    tally.add(mutants=1, caught=int(caught > 0))
    assert found["steps"]["tmpfile"] > _FEWEST_STEPS // 2
    assert caught, f"not caught on {kind} in {found['steps']} stops"
