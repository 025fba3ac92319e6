"""The same contract where the kernel or the file system lacks what publishing likes best."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.url import OptionValue
from tests.posix import children, faultlab, mounts
from tests.posix.children import (
    NO_DIRECT,
    NO_EMPTY_PATH,
    NO_PROC_LINK,
    NO_RENAME_FLAGS,
    NO_TMPFILE,
    Refusal,
)
from tests.posix.scenarios import SCENARIOS, Scenario

EMPTY_PATH = "O_TMPFILE, linkat by AT_EMPTY_PATH"
PROC = "O_TMPFILE, linkat by /proc/self/fd"
NAMED = "named temporary, rename"

#: What is refused, and how names appear all the same.
WORLDS: dict[str, tuple[tuple[Refusal, ...], str]] = {
    "nothing": ((), EMPTY_PATH),
    "AT_EMPTY_PATH": ((NO_EMPTY_PATH,), PROC),
    "O_TMPFILE": ((NO_TMPFILE,), NAMED),
    "O_TMPFILE, renameat2 flags": ((NO_TMPFILE, NO_RENAME_FLAGS), NAMED),
    "both links": ((NO_EMPTY_PATH, NO_PROC_LINK), NAMED),
    "both links, renameat2 flags": ((NO_EMPTY_PATH, NO_PROC_LINK, NO_RENAME_FLAGS), NAMED),
}
BUFFERED = tuple(s for s in SCENARIOS if not s.direct)


@pytest.fixture(autouse=True)
def _seccomp() -> None:
    children.need_seccomp()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def journaled_root(journaled_disk: Path) -> Path:
    """A root directory where durable blocks are published as visible ones are."""
    path = journaled_disk / "root"
    path.mkdir(mode=0o700)
    return path


def check_contract(scenario: Scenario, root: Path) -> kvio.Capabilities:
    """Run one scenario from a known state; it succeeds and leaves what it says."""
    scenario.arrange(root)
    with scenario.open(root) as store:
        for key, promised in scenario.run(store).items():
            assert not isinstance(promised, Exception), f"{scenario.name}: {promised!r}"
            stored = faultlab.peek(root, key, layout=scenario.layout)
            assert stored == promised, scenario.name
            path = faultlab.file_of(root, key, layout=scenario.layout)
            mode = scenario.options.get("file_mode", 0o600)
            assert stored is None or path.stat().st_mode & 0o7777 == mode, scenario.name
            assert stored is None or path.stat().st_nlink == 1, scenario.name
        assert not faultlab.temporaries(root), scenario.name
        return store.capabilities


@pytest.mark.parametrize("world", WORLDS)
def test_the_contract_holds_without(world: str, journaled_root: Path) -> None:
    """Every operation does the same through its fallback, and capabilities say which it was."""
    refusals, publish = WORLDS[world]

    def work() -> str:
        children.refuse(refusals)
        for number, scenario in enumerate(BUFFERED):
            own = journaled_root / str(number)
            own.mkdir(mode=0o700)
            capabilities = check_contract(scenario, own)
            if scenario.options.get("publish", "auto") == "auto":
                assert capabilities.publish == publish, capabilities
        return capabilities.publish

    children.in_child(work)


def test_an_exclusive_create_stays_exclusive(root: Path) -> None:
    """Without O_TMPFILE and RENAME_NOREPLACE still only one of two writers gets the key."""

    def work() -> None:
        children.refuse((NO_TMPFILE, NO_RENAME_FLAGS))
        with kvio.open_store("posix-tmpfile", root=root) as store:
            store.write_block("k", b"first", if_exists="error")
            with pytest.raises(kvio.BlockExistsError):
                store.write_block("k", b"second", if_exists="error")
            assert store.write_block("k", b"third").nbytes == 5
            assert bytes(store.read_block("k")) == b"first"

    children.in_child(work)
    assert not faultlab.temporaries(root)


@pytest.mark.root
@pytest.mark.slow
def test_the_contract_holds_where_every_name_is_an_inode(tmp_path: Path) -> None:
    """On bindfs a name is given by a link, and no operation does otherwise for that."""
    with mounts.bindfs(tmp_path) as place:
        for number, scenario in enumerate(BUFFERED):
            if scenario.options.get("durability") == "durable":
                continue  # which no FUSE server promises
            own = place / str(number)
            own.mkdir(mode=0o700)
            assert check_contract(scenario, own).publish == NAMED


def test_tmpfile_on_demand_is_refused_where_there_is_none(root: Path) -> None:
    """``publish=tmpfile`` without O_TMPFILE fails when the store is opened, with the reason."""

    def work() -> None:
        children.refuse((NO_TMPFILE,))
        with pytest.raises(kvio.UnsupportedError, match="O_TMPFILE"):
            kvio.open_store("posix-tmpfile", root=root, options={"publish": "tmpfile"})

    children.in_child(work)


def test_support_that_goes_away_is_noticed(root: Path) -> None:
    """A store opened while O_TMPFILE worked goes on by renaming when it no longer does."""

    def work() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            store.write_block("before", b"1")
            assert store.capabilities.publish == EMPTY_PATH
            children.refuse((NO_EMPTY_PATH, NO_PROC_LINK))
            store.write_block("linked", b"2")
            assert store.capabilities.publish == NAMED
            store.write_blocks([(f"k{i}", b"3") for i in range(5)])

    children.in_child(work)
    assert faultlab.peek(root, "linked") == b"2"
    assert [faultlab.peek(root, f"k{i}") for i in range(5)] == [b"3"] * 5
    assert not faultlab.temporaries(root)


def test_direct_io_that_is_refused_is_named(root: Path) -> None:
    """Where O_DIRECT is refused, posix-direct says so, and hybrid writes buffered."""

    def work() -> None:
        children.refuse((NO_DIRECT,))
        with pytest.raises(kvio.UnsupportedError, match="EINVAL"):
            kvio.open_store("posix-direct", root=root)
        with kvio.open_store("hybrid", root=root) as store:
            assert not store.capabilities.direct_io
            receipt = store.write_block("k", bytes(3 << 20))
            assert receipt.mode == "buffered"
            assert len(store.read_block("k")) == 3 << 20

    children.in_child(work)


@pytest.fixture
def no_proc() -> None:
    """Skip unless /proc can be taken away from a child."""
    children.need_root()


@pytest.mark.root
@pytest.mark.usefixtures("no_proc")
@pytest.mark.parametrize(
    ("refusals", "publish"),
    [((), EMPTY_PATH), ((NO_EMPTY_PATH,), NAMED), ((NO_TMPFILE,), NAMED)],
    ids=["", "and AT_EMPTY_PATH", "and O_TMPFILE"],
)
def test_the_contract_holds_without_proc(
    journaled_root: Path, refusals: tuple[Refusal, ...], publish: str
) -> None:
    """Without /proc nothing is lost but the procfs form of linkat."""

    def work() -> None:
        children.hide_proc()
        assert not os.path.exists("/proc/self")
        children.refuse(refusals)
        for number, scenario in enumerate(BUFFERED):
            own = journaled_root / str(number)
            own.mkdir(mode=0o700)
            capabilities = check_contract(scenario, own)
            if "publish" not in scenario.options:
                assert capabilities.publish == publish, capabilities

    children.in_child(work)


@pytest.mark.root
@pytest.mark.usefixtures("no_proc")
def test_without_proc_nobodys_temporaries_are_swept_early(root: Path) -> None:
    """A host that cannot name its boot sweeps by age alone."""
    options: dict[str, OptionValue] = {"publish": "rename"}

    def work() -> None:
        children.hide_proc()
        with kvio.open_store("posix-tmpfile", root=root, options=options) as store:
            store.write_block("k", b"data")
            temporary = root / "0" / "0" / f"{faultlab.TEMP_MARK}00000000-999999-{'0' * 32}"
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            assert store.sweep() == []
            os.utime(temporary, (1_000_000_000, 1_000_000_000))
            assert store.sweep() == [str(temporary)]

    children.in_child(work)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_durable_blocks_are_not_synced_without_a_name_where_that_keeps_nothing(
    tmp_path: Path, kind: str
) -> None:
    """Before Linux 6.16 btrfs logs nothing of a file that is synced while it has no name."""
    durable: dict[str, OptionValue] = {"durability": "durable", "layout": "plain"}
    with mounts.loop_filesystem(kind, tmp_path) as root:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            assert store.capabilities.publish == EMPTY_PATH
        with kvio.open_store("posix-tmpfile", root=root, options=durable) as store:
            assert store.capabilities.publish == (NAMED if kind == "btrfs" else EMPTY_PATH)
            assert store.write_block("a", b"bytes").level is kvio.Level.DURABLE
            said = "".join(store.capabilities.notes)
            assert ("may be lost on btrfs" in said) is (kind == "btrfs")
        if kind == "btrfs":
            options = {**durable, "publish": "tmpfile"}
            with pytest.raises(kvio.UnsupportedError, match=r"before it has a name.*leave publish"):
                kvio.open_store("posix-tmpfile", root=root, options=options)


def test_a_close_that_fails_says_why(root: Path) -> None:
    """The kernel's own error of the last call is reported; nothing gets a name."""

    def work() -> None:
        with kvio.open_store("posix-tmpfile", root=root, options={"publish": "rename"}) as store:
            store.write_block("k", b"before")
            temporary = os.dup(0)  # the number that the next file gets
            os.close(temporary)
            children.refuse((Refusal("close", 0, 0xFFFFFFFF, temporary, True, errno.EDQUOT),))
            with pytest.raises(kvio.StorageFullError) as caught:
                store.write_block("k", b"after", if_exists="replace")
            assert caught.value.errno == errno.EDQUOT
            assert bytes(store.read_block("k")) == b"before"

    children.in_child(work)
    assert not faultlab.temporaries(root)


def test_an_error_that_passes_changes_no_way_of_publishing(root: Path) -> None:
    """A temporary that cannot be opened now says nothing of O_TMPFILE."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        before = store.capabilities.publish
        with (
            faults.inject("open_temp", error=errno.EAGAIN),
            pytest.raises(kvio.TransientStorageError),
        ):
            store.write_block("k", b"data", if_exists="replace")
        store.write_block("k", b"data", if_exists="replace")

        assert store.capabilities.publish == before


@pytest.mark.parametrize(
    "refusal", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS], ids=errno.errorcode.get
)
def test_every_refusal_of_a_nameless_file_is_taken_for_one(root: Path, refusal: int) -> None:
    """File systems and kernels say it in different ways; a named temporary is made instead."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        with faults.inject("open_temp", error=refusal) as fault:
            store.write_block("k", b"data")
        assert fault.seen[faults.sites()["open_temp"]] == 2
        assert bytes(store.read_block("k")) == b"data"


def test_a_name_that_was_taken_and_is_free_again_costs_no_descriptor(root: Path) -> None:
    """The look at what stood there finds nothing to close: not the new block's own file."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("warm", b"data")
        closed = []
        for number in range(2):
            with faults.inject("link", nth=1 + 9 * (1 - number), error=errno.EEXIST) as fault:
                store.write_block(f"k{number}", b"data")
            closed.append(fault.seen[faults.sites()["close"]])
        assert [bytes(store.read_block(f"k{number}")) for number in range(2)] == [b"data"] * 2
    assert closed[0] == closed[1]


def test_a_directory_with_its_mode_is_not_given_it_again(root: Path) -> None:
    """Not every file system takes a change of mode: none is asked for where none is needed."""
    with kvio.open_store("posix-tmpfile", root=root, layout="plain") as store:
        with faults.inject("fchmod", error=errno.EPERM) as fault:
            store.write_block("new/k", b"data")
        assert fault.seen[faults.sites()["mkdir"]] == 1
        assert fault.seen[faults.sites()["fchmod"]] == 0
