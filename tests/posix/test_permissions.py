"""Stores that several users share: file_mode, dir_mode and group of all that a store makes."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio._native import faults
from kvio.backends.posix.directories import CALIBRATION_NAME
from kvio.diagnostics.tuning import Tuning, save
from kvio.filesystem.io_mode import CACHE_AWARE
from kvio.types import Layout
from tests.posix import children, faultlab

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

LARGE: Final = faultlab.pattern(7, 3 << 20)
KEYS: Final = [f"a/b{i}/k{i}" for i in range(40)]
#: Users and groups that need no entry in /etc.
OWNER: Final = 54321
MEMBER: Final = 54322
STRANGER: Final = 54323
GROUP: Final = 43210
SHARED: Final[dict[str, Any]] = {"file_mode": 0o640, "dir_mode": 0o2770, "group": GROUP}


def as_user(uid: int, work: Callable[[], None], *groups: int, umask: int = 0o077) -> None:
    """Do something in a child that is this user."""

    def run() -> None:
        children.become(uid, *groups)
        os.umask(umask)
        work()

    children.in_child(run)


def made_below(top: Path) -> set[tuple[bool, int, int]]:
    """List kinds (True: a directory), permissions and groups of all that lies below."""
    infos = [path.lstat() for path in top.rglob("*")]
    return {(stat.S_ISDIR(i.st_mode), stat.S_IMODE(i.st_mode), i.st_gid) for i in infos}


def write_in_every_way(store: kvio.Store) -> None:
    """Write small and large blocks, one by one and many, streams, and over existing ones."""
    store.write_block("small", b"data")
    store.write_block("small", b"other", if_exists="replace")
    store.write_block("large", LARGE)
    store.write_block("large", LARGE, if_exists="replace")
    assert all(result.ok for result in store.write_blocks([(key, b"data") for key in KEYS]))
    assert all(result.ok for result in store.write_blocks([("b1", LARGE), ("b2", LARGE)]))
    source = io.BytesIO(LARGE).readinto
    backend = faultlab.posix_backend(store)
    backend.write_stream("stream", source, nbytes=None, at_least=1, if_exists="keep")


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("durability", ["visible", "durable"])
@pytest.mark.parametrize("publish", ["auto", "rename"])
@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct", "hybrid"])
def test_all_that_a_store_makes_has_the_permissions_that_were_asked_for(
    disk_path: Path, umask: int, layout: Layout, durability: Any, publish: str, backend: str
) -> None:
    """Whatever the umask, the backend, the layout and the way of writing."""
    group = os.getegid()
    choice: dict[str, Any] = {"file_mode": 0o440, "dir_mode": 0o2750, "group": group}
    with faultlab.umask(umask):
        try:
            store = kvio.open_store(
                backend,
                root=disk_path / "x" / "y" / "root",
                durability=durability,
                layout=layout,
                options={"create": True, "publish": publish, **choice},
            )
        except kvio.UnsupportedError as exc:
            pytest.skip(f"the file system lacks what this needs: {exc}")
        with store:
            write_in_every_way(store)
            assert bytes(store.read_block("large")) == LARGE
    assert made_below(disk_path) == {(True, 0o2750, group), (False, 0o440, group)}


def test_a_store_is_its_owners_alone_by_default(tmp_path: Path) -> None:
    """0600 and 0700, though the umask would allow more."""
    with (
        faultlab.umask(0),
        kvio.open_store("posix-tmpfile", root=tmp_path / "root", create=True) as store,
    ):
        write_in_every_way(store)
    assert {(is_dir, mode) for is_dir, mode, _ in made_below(tmp_path)} == {
        (True, 0o700),
        (False, 0o600),
    }


def test_permissions_are_octal_in_a_url(tmp_path: Path) -> None:
    """As chmod reads them, with or without leading zeros; the group by name or number."""
    for number, (file_mode, dir_mode) in enumerate([("0640", "0750"), ("640", "0o750")]):
        root = tmp_path / str(number)
        url = f"hybrid://{root}?create=true&file_mode={file_mode}&dir_mode={dir_mode}"
        with kvio.open_store(f"{url}&group={os.getegid()}") as store:
            store.write_block("k", b"data")
        assert {(is_dir, mode) for is_dir, mode, _ in made_below(root)} == {
            (True, 0o750),
            (False, 0o640),
        }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file_mode": 640}, r"file_mode must be 0 to 0o777, such as 0o640, not 640"),
        ({"file_mode": 0o4755}, "file_mode must be 0 to 0o777"),
        ({"file_mode": -1}, "file_mode must be 0 to 0o777, such as 0o640, not -1"),
        ({"file_mode": True}, "'file_mode' must be permission bits in octal, not True"),
        ({"file_mode": "rw-r-----"}, "'file_mode' must be permission bits in octal"),
        ({"file_mode": "0690"}, "'file_mode' must be permission bits in octal, not '0690'"),
        ({"file_mode": 0o040}, "file_mode 0o40 does not let the owner read"),
        ({"dir_mode": 0o660}, "dir_mode 0o660 does not let the owner read, write and search"),
        ({"dir_mode": 0o4755}, "dir_mode must be 0 to 0o3777"),
        ({"group": "no such group"}, "there is no group 'no such group' on this machine"),
        ({"group": -1}, "there is no group -1"),
        ({"group": 1 << 32}, "there is no group 4294967296"),
        ({"group": str((1 << 32) - 1)}, "there is no group '4294967295'"),
        ({"group": ""}, "there is no group ''"),
        ({"group": True}, "'group'"),
        ({"group": 1.5}, "'group'"),
    ],
)
def test_what_are_no_permissions_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Before anything is made."""
    with pytest.raises(kvio.ConfigError, match=message):
        kvio.open_store("hybrid", root=tmp_path / "root", create=True, options=options)
    assert not (tmp_path / "root").exists()


def test_a_root_that_is_in_use_keeps_its_permissions(tmp_path: Path) -> None:
    """Only one that is empty, as its maker may have left it, gets those that were asked for."""
    options: dict[str, Any] = {"dir_mode": 0o750, "create": True}
    for number, content in enumerate(["something", None]):
        root = tmp_path / str(number)
        root.mkdir(mode=0o700)
        if content is not None:
            (root / content).touch()
        kvio.open_store("posix-tmpfile", root=root, options=options).close()
        assert stat.S_IMODE(root.stat().st_mode) == (0o750 if content is None else 0o700)


def test_directories_that_others_cannot_use_are_repaired_by_a_write(tmp_path: Path) -> None:
    """A store that was the owner's alone can be shared from now on; its old blocks stay as is."""
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_blocks([(key, b"data") for key in KEYS])
    with kvio.open_store("posix-tmpfile", root=root, options={"dir_mode": 0o750}) as store:
        store.write_blocks([(f"{key}-new", b"data") for key in KEYS])
        leaves = {path.parent for path in root.rglob("*-new")}
    assert {stat.S_IMODE(leaf.stat().st_mode) for leaf in leaves} == {0o750}
    assert {stat.S_IMODE(leaf.parent.stat().st_mode) for leaf in leaves} == {0o750}


def test_reading_changes_no_permissions(tmp_path: Path) -> None:
    """A store that is opened with a dir_mode and only read keeps its permissions."""
    with kvio.open_store("posix-tmpfile", root=tmp_path / "r", create=True) as store:
        store.write_block("k", b"data")
    before = made_below(tmp_path)
    with kvio.open_store("posix-tmpfile", root=tmp_path / "r", options={"dir_mode": 0o755}) as s:
        assert bytes(s.read_block("k")) == b"data"
        assert list(s.list_keys()) == ["k"]
    assert made_below(tmp_path) == before


@pytest.mark.parametrize("publish", ["auto", "rename"])
def test_a_group_that_is_refused_fails_the_write(tmp_path: Path, publish: str) -> None:
    """The error names the key and the step, and no block appears under wrong permissions."""
    options: dict[str, Any] = {"group": os.getegid(), "publish": publish, "layout": "plain"}
    with kvio.open_store("hybrid", root=tmp_path / "r", create=True, options=options) as store:
        store.write_block("first", b"data")
        with (
            faults.inject("fchown", error=errno.EPERM),
            pytest.raises(kvio.AccessDeniedError, match="set the group failed for block 'k'"),
        ):
            store.write_block("k", b"data")
        assert list(store.list_keys()) == ["first"]
        assert not faultlab.temporaries(tmp_path / "r")


@pytest.mark.parametrize("site", ["fchown", "fchmod"])
def test_a_temporary_is_its_owners_alone_until_it_has_its_group(tmp_path: Path, site: str) -> None:
    """A writer killed in between shows no bits to the group that the file first had."""
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    options: dict[str, Any] = {"group": os.getegid(), "file_mode": 0o644, "publish": "rename"}
    with kvio.open_store("posix-tmpfile", root=root, options=options) as store:
        store.write_block("k", b"data")  # makes the directory

    def write() -> None:
        with (
            faultlab.umask(0),
            kvio.open_store("posix-tmpfile", root=root, options=options) as store,
            faults.inject(site, error=faults.KILL),
        ):
            store.write_block("k", b"data", if_exists="replace")

    children.killed(write)
    (left,) = faultlab.temporaries(root)
    assert stat.S_IMODE(left.lstat().st_mode) == 0o600


def test_a_directory_is_its_owners_alone_until_it_has_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be given to the group is removed again."""
    seen = []

    def refuse(path: str, *_: int) -> None:
        seen.append(stat.S_IMODE(os.stat(path).st_mode))
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refuse)
    options: dict[str, Any] = {"group": os.getegid(), "dir_mode": 0o755}
    with faultlab.umask(0), pytest.raises(kvio.AccessDeniedError, match=r"make root .* for group"):
        kvio.open_store("hybrid", root=tmp_path / "a" / "b", create=True, options=options)
    assert seen == [0o700]
    assert not list(tmp_path.iterdir())


@pytest.mark.root
@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("site", ["mkdir", "fchown", "fchmod", "open_dir"])
def test_a_maker_killed_anywhere_leaves_what_its_user_repairs(
    public: Path, layout: Layout, site: str
) -> None:
    """After the next write of the same user, members of the group can use the directories."""
    public.chmod(0o777)
    for nth in range(1, 30):
        root = public / f"{site}{nth}"
        finished = public / f"finished-{site}{nth}"

        def write(root: Path = root, finished: Path = finished, nth: int = nth) -> None:
            children.become(OWNER, GROUP)
            os.umask(0o077)
            with kvio.open_store(
                "posix-tmpfile", root=root, layout=layout, create=True, options=SHARED
            ) as store:
                with faults.inject(site, nth=nth, error=faults.KILL):
                    store.write_block(KEYS[0], b"data")
                finished.touch()

        with suppress(AssertionError):  # it came to its end: there are no more such calls
            children.killed(write)

        def again(root: Path = root) -> None:
            with kvio.open_store("posix-tmpfile", root=root, layout=layout, options=SHARED) as s:
                s.write_block(KEYS[0], b"data", if_exists="replace")
                s.sweep()

        as_user(OWNER, again, GROUP)
        assert made_below(root) == {(True, 0o2770, GROUP), (False, 0o640, GROUP)}
        if finished.exists():
            return
        shutil.rmtree(root)
    pytest.fail("the writer was killed every time")


@pytest.mark.root
def test_no_umask_hides_direct_io(disk_path: Path) -> None:
    """The file that probes it is opened again, for which a umask may have taken the bits."""
    children.need_root()
    disk_path.chmod(0o777)

    def probe(umask: int) -> str:
        children.become(OWNER)
        os.umask(umask)
        with kvio.open_store("hybrid", root=disk_path / f"{umask:o}", create=True) as store:
            return str(store.capabilities.direct_io)

    found = [children.in_child(partial(probe, umask)) for umask in (0o022, 0o777)]
    assert found[0] == found[1]


@pytest.mark.root
@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct", "hybrid"])
def test_members_of_a_group_share_a_store(disk_path: Path, backend: str) -> None:
    """They read, replace, delete, verify and sweep each other's blocks; others do nothing."""
    children.need_root()
    disk_path.chmod(0o777)
    root = disk_path / "root"
    how: dict[str, Any] = {"options": {**SHARED, "shared_root": True}}

    def make() -> None:
        try:
            store = kvio.open_store(backend, root=root, create=True, options=SHARED)
        except kvio.UnsupportedError:
            return
        with store:
            write_in_every_way(store)

    def use() -> None:
        with kvio.open_store(backend, root=root, **how) as store:
            assert bytes(store.read_block("large")) == LARGE
            assert bytes(store.read_block("large", offset=5, nbytes=9)) == LARGE[5:14]
            assert store.count_leading(KEYS) == len(KEYS)
            assert store.write_block("large", b"theirs", if_exists="replace").nbytes == 6
            assert store.delete_block(KEYS[0])
            assert store.verify_block(KEYS[1]).ok
            store.sweep()
            store.write_block("theirs", LARGE)

    def read_back() -> None:
        with kvio.open_store(backend, root=root, options=SHARED) as store:
            assert bytes(store.read_block("large")) == b"theirs"
            assert bytes(store.read_block("theirs")) == LARGE
            assert not store.contains(KEYS[0])

    def be_refused() -> None:
        with pytest.raises(kvio.AccessDeniedError):
            kvio.open_store(backend, root=root, **how)

    as_user(OWNER, make, GROUP)
    if not root.exists():
        pytest.skip("the file system has no direct I/O")
    as_user(MEMBER, use, GROUP)
    as_user(OWNER, read_back, GROUP)
    as_user(STRANGER, be_refused)
    assert made_below(root) == {(True, 0o2770, GROUP), (False, 0o640, GROUP)}


@pytest.mark.root
def test_members_of_a_group_share_a_calibration(public: Path) -> None:
    """`hybrid` reads it for each of them; in a root of its owner's alone it is so too."""
    public.chmod(0o777)

    def tune() -> None:
        for name, options in (("shared", SHARED), ("private", {})):
            kvio.open_store("hybrid", root=public / name, create=True, options=options).close()
            save(str(public / name), Tuning(CACHE_AWARE, {}))

    def use() -> None:
        options: dict[str, Any] = {**SHARED, "shared_root": True}
        with kvio.open_store("hybrid", root=public / "shared", options=options) as store:
            store.write_block("k", b"data")

    as_user(OWNER, tune, GROUP)
    as_user(MEMBER, use, GROUP)
    files = [public / name / CALIBRATION_NAME for name in ("shared", "private")]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o640, 0o600]


@pytest.mark.root
def test_a_group_of_which_the_user_is_no_member_is_refused(public: Path) -> None:
    """When the store is made, and by the first write where it exists."""
    public.chmod(0o777)
    existing = public / "existing"
    existing.mkdir()
    os.chown(existing, OWNER, OWNER)

    def open_it() -> None:
        with pytest.raises(kvio.AccessDeniedError, match="make root"):
            kvio.open_store("hybrid", root=public / "new", create=True, options={"group": GROUP})
        with (
            kvio.open_store("hybrid", root=existing, options={"group": GROUP}) as store,
            pytest.raises(kvio.AccessDeniedError, match="'k'"),
        ):
            store.write_block("k", b"data")

    as_user(OWNER, open_it)


@pytest.mark.root
def test_damage_that_another_user_finds_is_put_aside_as_a_copy(public: Path) -> None:
    """The permissions of the damaged block are its owner's to change, so it is not linked."""
    public.chmod(0o777)
    root, aside = public / "root", public / "aside"

    def make() -> None:
        with kvio.open_store("posix-tmpfile", root=root, create=True, options=SHARED) as store:
            store.write_block("k", LARGE)
        (block,) = root.rglob("k")
        block.chmod(0o660)
        with block.open("r+b") as file:
            file.seek(100)
            file.write(b"\0damage\0")

    def quarantine() -> None:
        options: dict[str, Any] = {**SHARED, "shared_root": True}
        with kvio.open_store("posix-tmpfile", root=root, options=options) as store:
            assert store.remove_corrupt("k", quarantine=aside).path == str(aside / "k")
            assert not store.contains("k")

    as_user(OWNER, make, GROUP)
    as_user(MEMBER, quarantine, GROUP)
    assert {(is_dir, mode) for is_dir, mode, _ in made_below(aside)} == {(False, 0o600)}
