"""Directories that a dead writer left without the owner's bits: repaired when they are met."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio._native import faults
from kvio.types import Layout
from kvio.url import OptionValue
from tests.posix import children, faultlab

pytestmark = [
    pytest.mark.root,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

USER: Final = 65534
#: What a umask may take of the owner's bits.
MASKS: Final = (0o777, 0o477, 0o377, 0o277)
SITES: Final = ("mkdir", "open_dir", "fstat", "fchmod", "open_temp")
KEYS: Final = [f"a/b{i}/k{i}" for i in range(300)]


def make_root(public: Path, name: str = "root") -> Path:
    """Make a root that belongs to the user."""
    root = public / name
    root.mkdir(mode=0o700)
    os.chown(root, USER, USER)
    return root


def as_user(work: Callable[[], None], mask: int = 0o022) -> None:
    """Do something in a child that permission bits bind."""

    def run() -> None:
        children.become(USER)
        os.umask(mask)
        work()

    children.in_child(run)


def dies_as_user(work: Callable[[], None], mask: int) -> bool:
    """Do something in such a child; True if it was killed, False if it came to its end."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            children.become(USER)
            os.umask(mask)
            work()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed instead of being killed"
    return False


def use_all(root: Path, **options: Any) -> None:
    """Everything that a store does works there, in every directory."""
    with kvio.open_store("posix-tmpfile", root=root, **options) as store:
        assert set(store.list_keys()) <= {KEYS[0]}
        store.sweep()
        assert not faultlab.temporaries(root)
        assert store.write_block(KEYS[0], b"data").nbytes == 4
        assert bytes(store.read_block(KEYS[0])) == b"data"
        assert all(result.ok for result in store.write_blocks([(key, b"data") for key in KEYS]))
        assert store.count_leading(KEYS) == len(KEYS)
        assert all(store.delete_block(key) for key in KEYS[:20])


def modes_below(root: Path) -> set[tuple[bool, int]]:
    """Which modes directories (True) and files have below a root."""
    return {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in root.rglob("*")}


def write_and_die(root: Path, layout: Layout, publish: str, site: str, nth: int) -> None:
    """Write a block, unless the process is killed at a call."""
    options: dict[str, OptionValue] = {"publish": publish}
    with (
        kvio.open_store("posix-tmpfile", root=root, layout=layout, options=options) as store,
        faults.inject(site, nth=nth, error=faults.KILL),
    ):
        store.write_block(KEYS[0], b"data")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("mask", MASKS)
def test_death_at_any_call_under_any_umask_leaves_a_store_that_works(
    public: Path, mask: int, layout: Layout
) -> None:
    """A writer is killed while it makes directories: the next one of its user writes and sweeps."""
    deaths = unusable = 0
    for publish, site in itertools.product(("auto", "rename"), SITES):
        for nth in itertools.count(1):
            root = make_root(public)
            if not dies_as_user(partial(write_and_die, root, layout, publish, site, nth), mask):
                shutil.rmtree(root)
                break
            deaths += 1
            unusable += any(is_dir and mode != 0o700 for is_dir, mode in modes_below(root))
            as_user(partial(use_all, root, layout=layout))
            assert modes_below(root) == {(True, 0o700), (False, 0o600)}
            shutil.rmtree(root)
    print(f"{deaths} deaths, {unusable} of them left a directory without its mode")
    assert unusable >= 4


def open_durable_and_die(root: Path, nth: int) -> None:
    """Open a durable store, unless the process is killed when it sets the mode of a directory."""
    with faults.inject("fchmod", nth=nth, error=faults.KILL), suppress(kvio.UnsupportedError):
        kvio.open_store("posix-tmpfile", root=root, durability="durable").close()


@pytest.mark.parametrize("mask", MASKS)
def test_death_while_a_durable_store_opens_is_repaired(disk_path: Path, mask: int) -> None:
    """All 256 directories are made when it opens: some were left behind without their mode."""
    children.need_root()
    disk_path.chmod(0o755)
    for nth in (1, 2, 40):
        root = make_root(disk_path, f"root{nth}")
        if not dies_as_user(partial(open_durable_and_die, root, nth), mask):
            pytest.skip("the temporary directory's file system is not durable")
        assert any(mode != 0o700 for _, mode in modes_below(root))
        as_user(partial(use_all, root, durability="durable"))
        assert {mode for is_dir, mode in modes_below(root) if is_dir} == {0o700}


@pytest.mark.parametrize("mask", [*MASKS, 0o022])
def test_a_root_whose_maker_died_is_repaired_where_it_may_be_made(public: Path, mask: int) -> None:
    """With create=true; a root that has something in it and can be read is left as it is."""
    public.chmod(0o777)
    root = public / "root"

    def make() -> None:
        os.mkdir(root, 0o700)

    def open_made() -> None:
        with kvio.open_store("posix-tmpfile", root=root, options={"create": True}) as store:
            store.write_block("k", b"data")

    as_user(make, mask)
    as_user(open_made)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert faultlab.peek(root, "k") == b"data"


def test_what_was_opened_to_be_read_can_be_written_to(public: Path) -> None:
    """A directory that only lacks the right to write is kept open by a read, and then written."""
    root = make_root(public)

    def write() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            store.write_block("k", b"data")

    def read_and_write() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            assert bytes(store.read_block("k")) == b"data"
            store.write_block("k", b"more", if_exists="replace")

    as_user(write)
    faultlab.file_of(root, "k").parent.chmod(0o500)
    as_user(read_and_write)


# What is not repaired


def refused(root: Path) -> None:
    """Reading and writing a block are denied."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        for verb in (
            lambda: store.write_block("k", b"data"),
            lambda: store.read_block("k"),
            lambda: store.sweep(),
            lambda: list(store.list_keys()),
        ):
            with pytest.raises(kvio.StorageError) as caught:
                verb()
            assert caught.value.errno in (errno.EACCES, errno.ENOTDIR)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_directory_of_another_user_keeps_its_mode(public: Path, mode: int, depth: int) -> None:
    """It is denied, and its owner finds it as it was."""
    root = make_root(public)
    leaf = faultlab.file_of(root, "k").parent
    theirs = leaf if depth == 2 else leaf.parent
    leaf.mkdir(parents=True, mode=0o700)
    for path in (leaf, leaf.parent):
        os.chown(path, USER, USER)
    os.chown(theirs, 0, 0)
    theirs.chmod(mode)

    as_user(lambda: refused(root))
    info = theirs.stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid) == (mode, 0)


@pytest.mark.parametrize("mode", [0o000, 0o300])
def test_a_link_is_not_repaired_through(public: Path, mode: int) -> None:
    """A directory of this user outside the store, which a link in it leads to, keeps its mode."""
    root = make_root(public)
    outside = make_root(public, "outside")
    outside.chmod(mode)
    link = faultlab.file_of(root, "k").parent.parent
    link.symlink_to(outside)

    def work() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            with pytest.raises(kvio.KvioError):
                store.write_block("k", b"data")
            with pytest.raises(kvio.KvioError):
                store.read_block("k")
            store.sweep()

    as_user(work)
    assert stat.S_IMODE(outside.stat().st_mode) == mode


def test_a_directory_that_others_may_read_keeps_that(public: Path) -> None:
    """Only what its owner lacks is repaired: a directory of mode 0755 stays as it is."""
    root = make_root(public)
    leaf = faultlab.file_of(root, "k").parent
    leaf.mkdir(parents=True)
    for path in (leaf, leaf.parent):
        os.chown(path, USER, USER)
        path.chmod(0o755)

    def work() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            store.write_block("k", b"data")

    as_user(work)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (leaf, leaf.parent)} == {0o755}


def test_a_temporary_without_a_mode_is_in_the_way_of_nothing(public: Path) -> None:
    """Left by a writer that died before it gave it 0600: it is swept, and blocks are written."""
    root = make_root(public)

    def die() -> None:
        with kvio.open_store("posix-tmpfile", root=root, options={"publish": "rename"}) as store:
            store.write_block("a", b"data")
            with faults.inject("fchmod", error=faults.KILL):
                store.write_block("a", b"more", if_exists="replace")

    assert dies_as_user(die, 0o777)
    (left,) = faultlab.temporaries(root)
    assert stat.S_IMODE(left.stat().st_mode) == 0

    def work() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            assert store.write_block("a", b"more", if_exists="replace").nbytes == 4
            assert store.sweep() == [str(left)]

    as_user(work)
    assert not faultlab.temporaries(root)
