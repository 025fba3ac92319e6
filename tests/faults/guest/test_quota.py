"""Quotas of users, projects and inodes, which this machine's kernel may not have: in a guest.

Needs the Debian packages user-mode-linux, e2fsprogs and xfsprogs.
"""

from __future__ import annotations

import pytest

from tests.faults.guest import boot, disks
from tests.faults.guest.quotas import CASES, FEW
from tests.faults.guest.seen import Seen, see
from tests.faults.sizes import FULL
from tests.faults.totals import Tally
from tests.posix import children

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

_CASES = tuple(CASES) if FULL else FEW
_QUOTA = ("-O", "quota", "-E", "quotatype=usrquota")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Run the guest, once for all."""
    children.need_root()
    boot.need_guest()
    work = tmp_path_factory.mktemp("quotas")
    images = [disks.make_disk(work, "ext4", 300, *_QUOTA), disks.make_disk(work, "xfs", 400)]
    return see(work, "tests.faults.guest.quotas", images, *_CASES)


@pytest.mark.parametrize("case", _CASES)
def test_a_quota_that_is_used_up_is_a_full_medium(seen: Seen, case: str, tally: Tally) -> None:
    """Typed errors, true results, nothing left over: what the guest judged about itself."""
    receipts = seen[case]

    tally.add(faults=1, receipts=receipts, lost=0, torn=0)
