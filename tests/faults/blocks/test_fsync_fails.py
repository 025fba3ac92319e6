"""A disk that fails writes and heals: after a failed sync Linux calls pages clean that it lost.

The next sync of that file says 0, readers of the page cache see the new bytes, and the disk has
the old ones (ext4, xfs and btrfs alike). So an inode that saw an error must never be trusted.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.faults import mutants
from tests.faults.blocks import disk
from tests.faults.blocks.failing import CASES
from tests.faults.blocks.processes import report
from tests.faults.sizes import FULL
from tests.faults.totals import Tally
from tests.posix import strace

pytestmark = [pytest.mark.root, pytest.mark.slow]
#: The slice of ENOSPC: the store fails at once, so that ways to write differ less.
_FEW: Final = ("once", "direct-once", "shared", "staged", "staged-once")
#: One write fails: with EIO the block is written anew to a fresh inode.
_HEALED: Final = ("once", "direct-once", "named-once")
#: The disk is healed before kvio is asked: it must see by itself what is not there.
_REPORTED: Final = ("kept-reported", "kept-reported-plain")
_KEPT: Final = ("replace", "named-replace")
#: The disk's cache cannot be flushed, and the file system stops for good.
_FATAL: Final = ("flush", "delete")
#: What was done and not promised may have been done.
_LEFT: Final = {"flush": ("none", "new"), "delete": ("old", "none")}
_TYPES: Final = {errno.EIO: "StorageError", errno.ENOSPC: "StorageFullError"}
_MISBELIEVED: Final = ("once", "named-once", "shared", "staged-once")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", disk.FILESYSTEMS)
def test_no_receipt_is_given_for_bytes_that_were_lost(
    kind: str, number: int, server: Path, tmp_path: Path, tally: Tally
) -> None:
    """A receipt means that the disk has the bytes; without one the error is typed, nothing torn."""
    disk.need(kind)
    cases = tuple(CASES) if FULL or number == errno.EIO else _FEW
    found = {one["case"]: one for one in report("failing", tmp_path, server, kind, number, *cases)}

    for one in found.values():
        tally.add(faults=one["failures"], receipts=bool(one["receipt"]) + bool(one["again"]))
        tally.add(lost=bool(one["receipt"]) and one["found"] != "new", torn=one["found"] == "torn")
    assert tuple(found) == cases
    for case, one in found.items():
        check(case, one, number)


def check(case: str, one: dict[str, Any], number: int) -> None:
    """Hold one case's outcome against the contract."""
    assert one["failures"] > 0, f"{case}: nothing failed"
    assert one["again"] in ("", "new"), f"{case}: with the disk healed, {one}"
    survives = case in ("staged-once", *_REPORTED) or (case in _HEALED and number == errno.EIO)
    if survives:
        assert (one["receipt"], one["found"]) == ("durable", "new"), f"{case}: {one}"
        return
    assert one["receipt"] == "", f"{case}: {one}"
    left = _LEFT.get(case, ("old" if case in _KEPT else "none", ""))
    assert one["found"] in left, f"{case}: {one}"
    if case in _FATAL:  # the journal is lost too: what the file system then says is its own
        assert one["error"] in ("StorageError", "AccessDeniedError"), f"{case}: {one}"
    else:
        assert (one["error"], one["errno"]) == (_TYPES[number], number)


@pytest.mark.parametrize("case", _MISBELIEVED)
@pytest.mark.parametrize("kind", disk.FILESYSTEMS)
def test_believing_a_second_sync_is_caught(
    kind: str, case: str, server: Path, mutant_library: Path, tmp_path: Path, tally: Tally
) -> None:
    """Retrying a failed sync gives receipts for bytes that the disk does not have."""
    disk.need(kind)
    more = mutants.environment(mutant_library, "retry_failed_sync")
    (one,) = report("failing", tmp_path, server, kind, errno.EIO, case, more=more)
    caught = one["receipt"] == "durable" and one["found"] == "torn"

    tally.add(mutants=1, caught=int(caught))
    assert caught, f"not caught: {one}"


_CALL: Final = re.compile(r"\d+ +(fsync|fdatasync|close)\((\d+)<(.*)>(?:\(deleted\))?\) += (-?\d+)")


def calls_of(trace: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield name, descriptor, what it refers to, and result of the calls of a trace, in order."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        pid, _, rest = line.partition(" ")
        if rest.endswith("<unfinished ...>"):
            begun[pid] = rest.removesuffix("<unfinished ...>").strip()
            continue
        resumed = re.match(r"\s*<\.\.\. \w+ resumed>(.*)", rest)
        whole = f"{pid} {begun.pop(pid, '')}{resumed[1]}" if resumed else line
        if found := _CALL.match(whole):
            yield found[1], found[2], found[3], int(found[4])


@pytest.mark.parametrize("kind", disk.FILESYSTEMS if FULL else ["ext4"])
def test_a_descriptor_whose_sync_failed_is_never_synced_again(
    kind: str, server: Path, tmp_path: Path
) -> None:
    """Seen by strace: behind a sync that failed comes the descriptor's close, and no other sync."""
    disk.need(kind)
    trace = tmp_path / "trace"
    under = strace.command(trace, "-y", "-qq", "-s", "0", "-e", "trace=fsync,fdatasync,close")
    cases = ("once", "always", "named-always", "shared", "staged")
    (tmp_path / "work").mkdir()
    report("failing", tmp_path / "work", server, kind, errno.EIO, *cases, under=under)
    poisoned: set[str] = set()
    failed = 0
    for name, fd, target, result in calls_of(trace.read_text()):
        if "root" not in Path(target).parts[:-1]:
            continue
        if name == "close":
            poisoned.discard(fd)
            continue
        assert fd not in poisoned, f"{name}({fd}<{target}>) after a sync of it had failed"
        if result < 0:
            failed += 1
            poisoned.add(fd)

    assert failed >= len(cases), "the trace shows no sync that failed"
