"""`recover` goes on with what the dead left, and removes what cannot be gone on with."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.sharedfile import SharedFile, lifecycle
from kvio.sharedfile.names import Names
from kvio.sharedfile.state import SharedState
from tests.posix.children import NO_RENAME_FLAGS, need_seccomp, refuse
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES, Case

BUFFERED = CASES[0]
ODD = next(case for case in CASES if str(case) == "buffered-odd-sizes")


def die(path: Path, case: Case, site: str, *, nth: int = 1, aborting: bool = False) -> None:
    """Let a creator die at a call of what ends a file, or of creating it."""

    def work() -> None:
        if site in ("fallocate", "open_temp"):
            with faults.inject(site, nth=nth, error=faults.KILL):
                case.create(path)
        file = case.create(path)
        for rank in range(kills.WRITERS):
            kills.write_domain(file, rank, case)
        with faults.inject(site, nth=nth, error=faults.KILL):
            (file.abort if aborting else file.seal)()

    assert kills.killed(kills.in_child(work))


def calls(fault: object, site: str) -> int:
    """How often a site was called."""
    return int(fault.seen[faults.sites()[site]])  # type: ignore[attr-defined]  # of the C core


@pytest.mark.parametrize("case", CASES, ids=str)
def test_after_another_boot_nothing_counts(case: Case, disk_path: Path) -> None:
    """What a map says that was made before the machine was started is missing, all of it."""
    path = disk_path / "f"
    refusal = kills.need_direct(case, disk_path)
    if refusal:
        pytest.skip(f"the temporary directory's file system lacks it: {refusal}")
    kills.leave_half(path, case)
    with SharedFile.recover(path) as file:
        assert 0 < sum(cell.nbytes for cell in file.missing()) < case.size
    kills.forge_boot(kills.map_of(path))

    with SharedFile.recover(path) as file:
        assert sum(cell.nbytes for cell in file.missing()) == case.size
        assert kills.write_missing(file, None, case.payload) == case.size
        file.seal()

    assert kills.check_name(path, case.payload)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_what_the_dead_wrote_is_read_again(case: Case, layout: str, disk_path: Path) -> None:
    """A byte that changed on the disk since fails the seal of a later process; no name."""
    path = disk_path / "f"
    refusal = kills.need_direct(case, disk_path)
    if refusal:
        pytest.skip(f"the temporary directory's file system lacks it: {refusal}")

    def work() -> None:
        beside = layout == "plain" and "sidecar" in case.options
        file = case.create(path, layout=layout, sidecar=beside)
        for rank in range(kills.WRITERS):
            kills.write_domain(file, rank, case)
        os.kill(os.getpid(), 9)

    for damage in (True, False):
        assert kills.killed(kills.in_child(work))
        at = case.size // 3 - 20_000
        if damage:
            with kills.data_of(path).open("r+b") as raw:
                raw.seek(at)
                raw.write(bytes([case.payload[at] ^ 1]))
        with SharedFile.recover(path) as file:
            assert file.missing() == []
            if damage:
                with pytest.raises(kvio.CorruptBlockError, match=r"not what was written|abort it"):
                    file.seal()
                assert not path.exists()
                file.abort()
                assert os.listdir(disk_path) == []
            else:
                file.seal()
                assert path.read_bytes()[: case.size] == case.payload


@pytest.mark.parametrize("nth", [1, 2])
def test_an_abort_that_was_cut_short_is_carried_through(nth: int, disk_path: Path) -> None:
    """Killed while it removed things, it leaves nothing that can be sealed."""
    path = disk_path / "f"
    die(path, BUFFERED, "unlink", nth=nth, aborting=True)

    with pytest.raises(kvio.BlockNotFoundError):
        SharedFile.recover(path)

    assert os.listdir(disk_path) == []


def test_a_creation_that_was_cut_short_is_removed(disk_path: Path) -> None:
    """Killed while it allocated, a file has no bytes to go on with."""
    path = disk_path / "f"
    die(path, BUFFERED, "fallocate")
    with pytest.raises(kvio.BlockExistsError, match="recover"):
        BUFFERED.create(path)

    with pytest.raises(kvio.BlockNotFoundError, match="interrupted"):
        SharedFile.recover(path)

    assert os.listdir(disk_path) == []
    kills.whole_life(path, BUFFERED)


def test_a_map_that_was_never_finished_is_swept(disk_path: Path) -> None:
    """Killed before its map has its name, a creator leaves nothing that the next one minds."""
    path = disk_path / "f"

    def work() -> None:
        with faults.inject("rename", error=faults.KILL):
            BUFFERED.create(path)

    assert kills.killed(kills.in_child(work))
    assert len(os.listdir(disk_path)) == 1
    kills.whole_life(path, BUFFERED)
    assert sorted(os.listdir(disk_path)) == kills.names_of(disk_path / "f")


def test_a_writer_that_comes_too_early_is_reported_so(disk_path: Path) -> None:
    """While blocks are allocated the file is not ready yet, which is not damage."""
    path = disk_path / "f"
    die(path, BUFFERED, "fallocate")
    with pytest.raises(kvio.BlockNotFoundError, match="not ready"):
        SharedFile.open(path, 0)


@pytest.mark.parametrize("case", [BUFFERED, ODD], ids=str)
def test_a_file_that_has_its_name_is_synced_before_recover_says_so(
    case: Case, disk_path: Path
) -> None:
    """Killed before the directory was synced, a file is sealed, and recover syncs it."""
    path = disk_path / "f"
    die(path, case, "fsync_dir")

    with faults.inject("read", nth=1 << 30) as fault, SharedFile.recover(path) as file:
        assert file.mode is None
    assert calls(fault, "fsync_dir") >= 1
    assert kills.check_name(path, case.payload)
    assert sorted(os.listdir(disk_path)) == kills.names_of(disk_path / "f")


def test_a_directory_that_cannot_be_synced_is_not_called_sealed(disk_path: Path) -> None:
    """A recover that cannot make the name durable fails, and can be tried again."""
    path = disk_path / "f"
    die(path, BUFFERED, "fsync_dir")

    with (
        faults.inject("fsync_dir", error=errno.EIO),
        pytest.raises(kvio.StorageError, match="EIO"),
    ):
        SharedFile.recover(path)

    SharedFile.recover(path).close()
    assert kills.check_name(path, BUFFERED.payload)
    assert sorted(os.listdir(disk_path)) == kills.names_of(disk_path / "f")


def test_a_file_that_was_sealed_to_the_end_is_opened(disk_path: Path) -> None:
    """Of a seal that nothing cut short nothing is left but the file, which can be read."""
    path = disk_path / "f"
    kills.whole_life(path, BUFFERED)
    with SharedFile.recover(path) as file:
        out = bytearray(BUFFERED.size)
        file.pread_into(out)
    assert out == BUFFERED.payload


def test_what_failed_is_only_given_up(disk_path: Path) -> None:
    """A file whose seal could not be synced cannot be sealed by whoever takes over either."""
    path = disk_path / "f"

    def work() -> None:
        file = BUFFERED.create(path)
        kills.write_missing(file, None, BUFFERED.payload)
        with faults.inject("fdatasync", nth=2, error=errno.EIO), pytest.raises(kvio.StorageError):
            file.seal()
        os.kill(os.getpid(), 9)

    assert kills.killed(kills.in_child(work))
    with SharedFile.recover(path) as file:
        with pytest.raises(kvio.KvioError, match="failed"):
            file.seal()
        assert not path.exists()
        file.abort()
    assert os.listdir(disk_path) == []


def test_a_newer_creators_map_is_left_alone(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recoverer that is slow finds a file sealed and made anew meanwhile: it removes nothing."""
    path = disk_path / "f"
    file = BUFFERED.create(path)
    kills.write_missing(file, None, BUFFERED.payload)
    open_map = lifecycle.find_shared_state

    def slowly(names: Names) -> SharedState:
        opened = open_map(names)
        monkeypatch.undo()
        file.seal()
        file.close()

        def work() -> None:
            with faults.inject("fallocate", error=faults.KILL):
                BUFFERED.create(path, if_exists="replace")

        assert kills.killed(kills.in_child(work))
        kills.data_of(path).unlink()  # as if it had not come that far
        return opened

    monkeypatch.setattr(lifecycle, "find_shared_state", slowly)
    before = None
    try:
        SharedFile.recover(path).close()
    except kvio.KvioError as exc:
        before = exc
    assert kills.map_of(path).exists() or "cut short" in str(before)
    assert kills.check_name(path, BUFFERED.payload)


@pytest.mark.parametrize("nth", [1, 2])
def test_death_between_link_and_unlink_leaves_a_sealed_file(nth: int, disk_path: Path) -> None:
    """Where renames know no flags a name is linked: a file with both names is sealed."""
    need_seccomp()
    path = disk_path / "f"

    def work() -> None:
        refuse([NO_RENAME_FLAGS])
        with faults.inject("unlink", nth=1, error=0) as fault:
            file = BUFFERED.create(path)
            made = calls(fault, "unlink")
        kills.write_missing(file, None, BUFFERED.payload)
        assert made
        with faults.inject("unlink", nth=nth, error=faults.KILL):
            file.seal()

    assert kills.killed(kills.in_child(work))
    assert kills.check_name(path, BUFFERED.payload)

    with SharedFile.recover(path) as file:
        assert file.mode is None, "a published file can be written"
    assert kills.check_name(path, BUFFERED.payload)
    assert sorted(os.listdir(disk_path)) == kills.names_of(disk_path / "f")
