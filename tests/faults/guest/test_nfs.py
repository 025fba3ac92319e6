"""NFSv4.2, whose server fills up behind the client's back: write says OK, fsync or close does not.

In a guest, which is server and client. Needs the Debian packages user-mode-linux,
nfs-kernel-server, nfs-common, iproute2 and e2fsprogs, and a C compiler.
"""

from __future__ import annotations

import shutil
from typing import Final

import pytest

from tests.faults.full import liar
from tests.faults.guest import boot, disks
from tests.faults.guest.nfs import CASES, LIARS
from tests.faults.guest.seen import Seen, see
from tests.faults.sizes import FULL
from tests.faults.totals import Tally
from tests.posix import children

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

_PROGRAMS: Final = {
    "rpc.nfsd": "nfs-kernel-server",
    "exportfs": "nfs-kernel-server",
    "mount.nfs4": "nfs-common",
    "ip": "iproute2",
}
_FEW: Final = ("late", "nfs-visible", "nfs-durable")
_CASES: Final = tuple(CASES) if FULL else _FEW
_LIARS: Final = tuple(LIARS) if FULL else ("sync_is_fine",)
_DISK_MIB: Final = 40


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Run the guest, once for all."""
    children.need_root()
    boot.need_guest()
    for program, package in _PROGRAMS.items():
        if shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
            pytest.skip(f"needs {program} (Debian package {package})")
    work = tmp_path_factory.mktemp("nfs")
    library = liar.build(work)
    images = [disks.make_disk(work, "ext4", _DISK_MIB, "-N", "4096")]
    return see(work, "tests.faults.guest.nfs", images, str(library), *_CASES, *_LIARS)


def test_the_server_is_late(seen: Seen) -> None:
    """A full server is not reported by write: else the other tests prove nothing."""
    assert seen["late"] == "close"


@pytest.mark.parametrize("case", [case for case in _CASES if case != "late"])
def test_a_late_error_costs_no_block_and_makes_no_receipt(
    seen: Seen, case: str, tally: Tally
) -> None:
    """Typed errors, true results, nothing left over on the server: what the guest judged."""
    receipts = seen[case]

    tally.add(faults=1, receipts=receipts, lost=0, torn=0)


@pytest.mark.parametrize("variant", _LIARS)
def test_a_store_that_takes_no_heed_of_late_errors_is_caught(
    seen: Seen, variant: str, tally: Tally
) -> None:
    """A process that ignores fsync and close reports blocks that the server does not have."""
    caught = seen[variant]

    tally.add(mutants=1, caught=int(caught))
    assert caught, liar.LATE[variant]
