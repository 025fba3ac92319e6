"""Every system call of a shared file's life fails in every way, one at a time."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvio
from kvio._native import faults
from kvio.sharedfile import SharedFile
from kvio.types import Receipt
from tests.posix import faultlab
from tests.sharedfile import kills, raw
from tests.sharedfile.kills import CASES, Case

ERRORS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EINTR,
    errno.ENOMEM,
    errno.EACCES,
)
FOR_EVER = 1 << 20
#: What a receipt rests on; nothing may go on over one that failed.
SYNCS = ("fdatasync", "fsync_dir")
KINDS: dict[int, type[kvio.KvioError]] = {
    errno.EIO: kvio.StorageError,
    errno.ENOSPC: kvio.StorageFullError,
    errno.EDQUOT: kvio.StorageFullError,
    errno.ENOMEM: kvio.OutOfMemoryError,
    errno.EACCES: kvio.AccessDeniedError,
}
#: For layouts whose every system call another one makes as well.
FEW_ERRORS = (errno.EIO, errno.EINTR)
#: Calls of one site that are failed one by one, and the last; the others do what these did.
MOST_CALLS = 3
BUFFERED = CASES[0]

pytestmark = pytest.mark.slow


class Fault(NamedTuple):
    """One way for one call to fail."""

    site: str
    nth: int
    error: int = 0
    times: int = 1
    transfer: int | None = None

    def __str__(self) -> str:
        what = errno.errorcode.get(self.error, f"{self.transfer} bytes")
        return f"{self.site} call {self.nth}: {what} x {self.times}"


@pytest.fixture
def root(disk_path: Path) -> Path:
    """Return an empty directory."""
    path = disk_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, root: Path) -> Case:
    """Return every case that the file system supports."""
    case: Case = request.param
    refusal = kills.need_direct(case, root)
    if refusal:
        pytest.skip(f"the temporary directory's file system lacks it: {refusal}")
    return case


def seal_all(path: Path, case: Case, made: list[SharedFile]) -> Receipt:
    """Live a whole life; handles go to *made* for whoever cleans up."""
    file = case.create(path)
    made.append(file)
    with SharedFile.open(path, 1) as writer:
        kills.write_domain(writer, 1, case)
    kills.write_domain(file, 0, case)
    owed = [file.submit_pwrite(case.payload[a:b], a) for a, b in kills.pieces(file, 2, case.piece)]
    wait(owed)
    errors = [error for future in owed if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, kvio.StoreClosedError)):
        raise error  # what failed, not what was refused after that
    receipt = file.seal()
    assert receipt.level == "durable"
    return receipt


def seen_by(path: Path, case: Case) -> dict[str, int]:
    """Count the calls of an undisturbed life by site; its file is gone after that."""
    made: list[SharedFile] = []
    with faults.inject("read", nth=1 << 30) as fault:
        seal_all(path, case, made)
        seen = {name: fault.seen[number] for name, number in faults.sites().items()}
    made[0].close()
    kills.remove(path)
    return {site: count for site, count in seen.items() if count}


def give_up(path: Path, made: list[SharedFile]) -> None:
    """Abort what a failed life left, as a user would."""
    for file in made:
        try:
            file.abort()
        except kvio.StoreClosedError:
            file.close()
    try:
        with SharedFile.recover(path) as file:
            if file.mode is not None:
                file.abort()
    except kvio.BlockNotFoundError:
        pass


def try_with(fault: Fault, path: Path, case: Case) -> str:
    """Live with one fault and check what the life promises then."""
    made: list[SharedFile] = []
    arguments: dict[str, Any] = {"nth": fault.nth, "times": fault.times, "error": fault.error}
    error = None
    try:
        with faults.inject(fault.site, transfer=fault.transfer, **arguments) as armed:
            seal_all(path, case, made)
    except kvio.KvioError as exc:
        error = exc.with_traceback(None)
    assert armed.seen[faults.sites()[fault.site]] >= fault.nth, "the fault did not come to pass"
    if error is None:
        lost = fault.site in SYNCS and fault.error != errno.EINTR
        assert not lost, "sealed over a sync that failed"
        made[0].close()
        if fault.site == "unlink":  # the map stays: who recovers removes it
            SharedFile.recover(path).close()
        assert kills.check_name(path, case.payload)
        assert sorted(os.listdir(path.parent)) == kills.names_of(path)
        kills.remove(path)
        return "sealed"
    assert fault.error != errno.EINTR, error
    check_error(error, fault)
    stands = kills.check_name(path, case.payload)
    assert not stands or fault.site in ("fsync_dir", "alive"), f"no receipt, but a file: {error}"
    if "sidecar" in str(error):  # the bytes of the file are whole and synced
        made[0].seal()
        made[0].close()
        stands = kills.check_name(path, case.payload)
        assert stands
    elif not stands and made:
        with pytest.raises(kvio.KvioError):
            made[0].seal() if error_is_final(fault) else refuse()
        assert not path.exists()
    give_up(path, made)
    assert sorted(os.listdir(path.parent)) == (kills.names_of(path) if stands else [])
    kills.remove(path)
    return "failed"


def descriptors(expected: dict[int, str]) -> dict[int, str]:
    """List open descriptors; a map that an error's frames hold is collected before it counts."""
    found = faultlab.open_descriptors()
    if found != expected:
        gc.collect()
        found = faultlab.open_descriptors()
    return found


def error_is_final(fault: Fault) -> bool:
    """Whether bytes may be lost, so that no later seal may succeed."""
    return fault.site in ("write", "fdatasync")


def refuse() -> None:
    """Stand for a seal that need not be tried."""
    raise kvio.StoreClosedError("not tried")


def check_error(error: kvio.KvioError, fault: Fault) -> None:
    """Check that an error is of the tree, and says what the kernel said."""
    if fault.transfer is not None or fault.site in ("open_read", "rename", "unlink"):
        assert isinstance(error, kvio.KvioError)
        return
    assert isinstance(error, kvio.StorageError), error
    assert error.errno == fault.error, error
    assert isinstance(error, KINDS[fault.error]), error


def all_faults(seen: dict[str, int], case: Case) -> Iterator[Fault]:
    """Yield every fault to try."""
    odd = case.layout == "odd-sizes" and case.mode != "hybrid"
    for site, count in seen.items():
        for nth in sorted({*range(1, min(count, MOST_CALLS if odd else 1) + 1), count}):
            for error in ERRORS if odd else FEW_ERRORS:
                yield Fault(site, nth, error)
            yield Fault(site, nth, errno.EIO, FOR_EVER)
    for nth in {1, 2, seen["write"] // 2, seen["write"]}:
        for transfer in (1, faults.HALF, 0):
            yield Fault("write", nth, transfer=transfer)


def test_every_fault_at_every_call(case: Case, root: Path) -> None:
    """A typed error and no name, no receipt and no leftovers, or the file as it should be."""
    path = root / "f"
    seen = seen_by(path, case)
    assert {"open_temp", "fallocate", "write", "fdatasync", "rename", "fsync_dir"} <= set(seen)
    outcomes: dict[str, int] = {}
    threads = raw.threads()

    for fault in all_faults(seen, case):
        before = faultlab.open_descriptors()
        try:
            said = try_with(fault, path, case)
            assert descriptors(before) == before, "a descriptor leaked"
            assert not raw.threads() - threads, "a thread leaked"
        except (AssertionError, kvio.KvioError) as exc:
            exc.add_note(str(fault))
            raise
        outcomes[said] = outcomes.get(said, 0) + 1
    print(f"{case}: {outcomes}")
    assert outcomes["failed"] > 30


@pytest.mark.parametrize("transfer", [1, faults.HALF])
def test_short_writes_are_finished(case: Case, root: Path, transfer: int) -> None:
    """A kernel that takes a part of each write is asked again, or the error is typed."""
    path = root / "f"
    made: list[SharedFile] = []
    try:
        with faults.inject("write", transfer=transfer, times=3 if case.mode == "buffered" else 1):
            seal_all(path, case, made)
    except kvio.StorageError:
        assert case.mode != "buffered"
        give_up(path, made)
        assert os.listdir(root) == []
    else:
        made[0].close()
        assert kills.check_name(path, case.payload)


@pytest.mark.parametrize("site", ["write", "fdatasync"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_writers_failure_fails_the_seal_by_name(
    case: Case, root: Path, site: str, error: int
) -> None:
    """Of its write or of its last sync alone: seal names the rank, however often it is tried."""
    path = root / "f"
    file = case.create(path)
    for rank in (0, 2):
        kills.write_domain(file, rank, case)
    writer = SharedFile.open(path, 1)
    failing = faults.inject(site, nth=1, error=error)
    if site == "fdatasync":
        kills.write_domain(writer, 1, case)
        with failing, pytest.raises(KINDS[error]):
            writer.close()
    else:
        with failing, pytest.raises(KINDS[error]):
            kills.write_domain(writer, 1, case)
        writer.close()

    for _ in range(2):
        with pytest.raises(KINDS[error], match="rank 1") as caught:
            file.seal()
        assert isinstance(caught.value, kvio.StorageError)
        assert caught.value.errno == error
    assert not path.exists()
    with pytest.raises(kvio.StoreClosedError):
        file.pwrite(b"x", 0)
    file.abort()
    assert os.listdir(root) == []


@pytest.mark.parametrize("own", [True, False], ids=["the writer's", "the seal's"])
def test_a_descriptor_that_failed_is_never_synced_again(root: Path, own: bool) -> None:  # noqa: FBT001
    """Neither by another seal, nor by close, nor by abort."""
    path = root / "f"
    file = BUFFERED.create(path)
    kills.write_missing(file, None, BUFFERED.payload)
    with faults.inject("fdatasync", nth=1 if own else 2, error=errno.EIO) as fault:
        with pytest.raises(kvio.StorageError):
            file.seal()
        syncs = fault.seen[faults.sites()["fdatasync"]]
        assert syncs == (1 if own else 2)
        for again in (file.seal, file.seal, file.abort):
            try:
                again()
            except kvio.KvioError:
                assert again != file.abort
            else:
                assert again == file.abort
        file.close()
        assert fault.seen[faults.sites()["fdatasync"]] == syncs
    assert os.listdir(root) == []


def test_an_abort_waits_for_writes_under_way(root: Path) -> None:
    """It ends its threads, and closes the descriptor after the last write, not under it."""
    case = Case("buffered", "contiguous", 6_000_000, 100_001)
    threads = raw.threads()
    file = case.create(root / "f")
    owed = [file.submit_pwrite(case.payload[a:b], a) for a, b in kills.pieces(file, 0, case.piece)]

    file.abort()

    assert not raw.threads() - threads
    for future in owed:
        error = future.exception()
        assert error is None or isinstance(error, kvio.StoreClosedError), error
    assert os.listdir(root) == []


def test_a_close_after_another_failed_waits_for_writes_under_way(root: Path) -> None:
    """A handle of a file that cannot be finished ends its threads too."""
    case = Case("buffered", "contiguous", 6_000_000, 100_001)
    threads = raw.threads()
    file = case.create(root / "f")
    writer = SharedFile.open(root / "f", 1)
    with faults.inject("write", error=errno.EIO), pytest.raises(kvio.StorageError):
        kills.write_domain(file, 0, case)
    todo = list(kills.pieces(writer, 1, case.piece))
    owed = [writer.submit_pwrite(case.payload[a:b], a) for a, b in todo]

    writer.close()

    assert not raw.threads() - threads
    for future in owed:
        with pytest.raises(kvio.StoreClosedError, match="failed"):
            future.result()
    file.abort()
    assert os.listdir(root) == []


def test_an_abort_that_failed_can_be_tried_again(root: Path) -> None:
    """Where names cannot be removed it says so; later it removes them, and only its own."""
    for nth in (1, 2):
        path = root / "f"
        file = BUFFERED.create(path)
        with faults.inject("unlink", nth=nth, error=errno.EIO), pytest.raises(kvio.StorageError):
            file.abort()
        with pytest.raises(kvio.KvioError):
            file.seal()
        with pytest.raises(kvio.BlockExistsError):
            BUFFERED.create(path)
        file.abort()
        assert os.listdir(root) == []


def test_a_name_that_was_taken_meanwhile_is_kept(root: Path) -> None:
    """A file that somebody put there fails the seal; once it is gone the seal succeeds."""
    path = root / "f"
    with BUFFERED.create(path) as file:
        kills.write_missing(file, None, BUFFERED.payload)
        path.write_bytes(b"mine")
        with pytest.raises(kvio.BlockExistsError):
            file.seal()
        assert path.read_bytes() == b"mine"
        path.unlink()
        file.seal()
    assert kills.check_name(path, BUFFERED.payload)


def lasting(call: Callable[[], object], site: str) -> None:
    """Let a call meet a fault that does not go away."""
    with faults.inject(site, times=FOR_EVER, error=errno.EIO), pytest.raises(kvio.StorageError):
        call()


@pytest.mark.parametrize("site", ["fallocate", "unlink", "rename", "open_temp", "fchmod"])
def test_a_creation_that_failed_can_be_done_again(root: Path, site: str) -> None:
    """In the same process, at once, after what could not be removed was recovered."""
    path = root / "f"
    lasting(lambda: BUFFERED.create(path), site)
    gc.collect()
    give_up(path, [])
    kills.whole_life(path, BUFFERED)
    assert kills.check_name(path, BUFFERED.payload)
    assert os.listdir(root) == ["f"]
