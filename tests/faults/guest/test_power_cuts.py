"""A machine loses its power under load: what had a receipt is there afterwards, whole.

The machine is a User-Mode Linux guest (Debian package user-mode-linux) with an ext4, an xfs and a
btrfs disk. It is killed at once when a random number of receipts have come, so that whatever
followed the last one has had no time to reach the disk by itself. Then this machine mounts the
disks and looks. A control in the same guest, not synced, must come out torn or lost, or the cuts
prove nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.faults import mutants
from tests.faults.guest import boot, disks, judging
from tests.faults.guest.judging import Told, Verdict
from tests.faults.guest.workload import LANES, PLACES, SHARED
from tests.faults.sizes import FULL, seed, size
from tests.faults.totals import Tally
from tests.posix import children

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

_DISK_MIB = 600
_MORE_RECEIPTS = 400
_WORKLOAD = "tests.faults.guest.workload"
_TRIES = 5
#: What a sync that failed is made of, no cut can show.
_BROKEN = [one for one in mutants.MUTANTS if one != "retry_failed_sync"]


@pytest.fixture
def images(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Yield a disk of each kind, gone after the test."""
    children.need_root()
    boot.need_guest()
    made = {kind: disks.make_disk(tmp_path, kind, _DISK_MIB) for kind in disks.KINDS}
    yield made
    for image in made.values():
        image.unlink()


def live_and_die(
    work: Path,
    images: dict[str, Path],
    cut: int,
    choose: random.Random,
    environment: Mapping[str, str] | None = None,
) -> list[Told]:
    """Boot a machine, let every lane write, and take the power away; the receipts that came."""
    work.mkdir(exist_ok=True)
    arguments = [str(cut), *images]
    lanes = {(kind, lane) for kind in images for lane in LANES}
    more = choose.randrange(_MORE_RECEIPTS)
    receipts: list[Told] = []
    machine = boot.Guest(
        work, _WORKLOAD, arguments, disks=list(images.values()), environment=environment
    )
    with machine as guest:
        for line in guest.lines():
            receipts.append(judging.reported(line))
            lanes.discard((receipts[-1].disk, receipts[-1].place))
            more -= not lanes
            if more < 0:
                break
        else:
            pytest.fail(f"the guest ended by itself\n{guest.console}")
        receipts += map(judging.reported, guest.cut())
    return receipts


def judge(images: dict[str, Path], receipts: list[Told], *, durable: bool) -> Verdict:
    """Mount every disk and read all that promises durability, or all that does not."""
    verdict = Verdict()
    for kind, image in images.items():
        with disks.mounted(image, kind) as root:
            for place in PLACES:
                if place.durable is durable:
                    newest = judging.newest_of(receipts, kind, place.name)
                    verdict.add(judging.judge_store(root, place, newest))
            if durable:
                newest = judging.newest_of(receipts, kind, SHARED)
                verdict.add(judging.judge_shared(root, newest))
    return verdict


@pytest.mark.parametrize("series", range(size(1, 5)))
def test_what_had_a_receipt_survives_a_power_cut(
    tmp_path: Path, images: dict[str, Path], tally: Tally, series: int
) -> None:
    """Durable receipts are whole on every file system after every cut; the control's are not.

    The disks live through a series of cuts, so that each machine writes on what the last one left.
    """
    choose = random.Random(f"{seed()} {series}")
    receipts: list[Told] = []
    verdict = Verdict()
    for cut in range(size(1, 6)):
        receipts += live_and_die(tmp_path / "guest", images, cut, choose)
        verdict = judge(images, receipts, durable=True)
        tally.add(cuts=1, lost=len(verdict.lost), torn=len(verdict.torn))

        assert not verdict.bad, f"cut {cut} of series {series}, seed {seed()}: {verdict.bad}"
    control = judge(images, receipts, durable=False)
    unsafe = len(control.lost) + len(control.torn)
    print(f"control: {unsafe} of {control.receipts} blocks were lost or torn")
    tally.add(receipts=verdict.receipts, mutants=1, caught=int(unsafe > 0))
    assert not control.wrong
    assert unsafe > control.receipts // 2, "the power was not cut"


@pytest.mark.parametrize("variant", _BROKEN if FULL else ["no_file_sync"])
def test_a_protocol_without_its_syncs_is_caught(
    tmp_path: Path, images: dict[str, Path], tally: Tally, variant: str
) -> None:
    """Blocks that a broken protocol reported are missing or torn after one of a few cuts."""
    environment = mutants.environment(mutants.build(tmp_path), variant)
    choose = random.Random(seed())
    receipts: list[Told] = []
    bad: list[str] = []
    for cut in range(_TRIES):
        receipts += live_and_die(tmp_path / "guest", images, cut, choose, environment)
        bad = judge(images, receipts, durable=True).bad
        tally.add(cuts=1)
        if bad:
            break
    print(f"{variant}: {len(bad)} of {len(receipts)} receipts were broken after cut {cut}")
    tally.add(mutants=1, caught=int(bool(bad)))
    assert bad, mutants.MUTANTS[variant]
