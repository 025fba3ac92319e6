"""A store whose root is moved away while it is open gives no receipts for what it was moved to."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Literal

import pytest

import kvio
from tests.posix import children, strace

_CLOCKS: Final = tuple(
    f"kvio.backends.posix.{name}.monotonic" for name in ("directories", "engine", "quick")
)
_LARGE: Final = 9 * kvio.MiB

Move = Callable[[Path], object]
Write = Callable[[kvio.Store, str], Any]


class Clock:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What stores take the time from."""
    clock = Clock()
    for name in _CLOCKS:
        monkeypatch.setattr(name, clock)
    return clock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root below a directory of its own, by way of a link to it."""
    (tmp_path / "real" / "parent" / "kv").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to("real")
    return tmp_path / "link" / "parent" / "kv"


def _replace(root: Path) -> None:
    root.rename(root.with_name("old"))
    root.mkdir(mode=0o700)


def _replace_parent_by_a_file(root: Path) -> None:
    root.parent.rename(root.parent.with_name("old"))
    root.parent.touch()


def _point_elsewhere(root: Path) -> None:
    link = root.parents[1]
    other = link.with_name("other")
    shutil.copytree(link.resolve(), other)
    link.unlink()
    link.symlink_to(other)


def _point_at_itself(root: Path) -> None:
    link = root.parents[1]
    link.unlink()
    link.symlink_to(link.name)


MOVES: dict[str, Move] = {
    "moved": lambda root: root.rename(root.with_name("old")),
    "moved with its parent": lambda root: root.parent.rename(root.parent.with_name("old")),
    "removed": shutil.rmtree,
    "replaced": _replace,
    "parent replaced by a file": _replace_parent_by_a_file,
    "link pointed elsewhere": _point_elsewhere,
    "link pointed at itself": _point_at_itself,
}


def _batch(store: kvio.Store, key: str, timeout: float | None = None) -> None:
    results = store.write_blocks([(key, b"data"), (f"{key}2", b"more")], timeout=timeout)
    errors = [result.error for result in results]
    assert [result.status for result in results] == ["failed"] * 2
    assert [getattr(error, "key", None) for error in errors] == [key, f"{key}2"]
    assert errors[0] is not None
    raise errors[0]


WRITES: dict[str, Write] = {
    "one piece": lambda store, key: store.write_block(key, b"data"),
    "pieces": lambda store, key: store.write_block(key, [b"da", b"ta"]),
    "replace": lambda store, key: store.write_block(key, b"data", if_exists="replace"),
    "large": lambda store, key: store.write_block(key, bytearray(_LARGE)),
    "timeout": lambda store, key: store.write_block(key, b"data", timeout=60),
    "submit": lambda store, key: store.submit_write(key, b"data").result(),
    "stream": lambda store, key: store._write_stream(
        key, BytesIO(bytes(65 * kvio.MiB)).readinto, nbytes=None, if_exists="keep"
    ),
    "batch": _batch,
    "batch, timeout": lambda store, key: _batch(store, key, 60),
}


def files(directory: Path) -> set[Path]:
    """List all files below a directory."""
    return {path for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("write", WRITES)
def test_no_write_has_a_receipt_when_the_root_is_elsewhere(
    clock: Clock, root: Path, move: str, write: str
) -> None:
    """Whatever became of the path, and whichever verb writes; nothing goes elsewhere afterwards."""
    with kvio.open_store("hybrid", root=root) as store:
        store.write_block("k", b"data")
        MOVES[move](root)
        clock.now_s += 3600  # the store was idle

        for _ in range(2):
            with pytest.raises(kvio.RootMovedError, match=re.escape(repr(str(root)))) as caught:
                WRITES[write](store, "d/k")
            assert caught.value.key == "d/k"
        before = files(root.parents[2])
        with pytest.raises(kvio.RootMovedError):
            WRITES[write](store, "e/k")
        assert files(root.parents[2]) == before


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("durability", ["visible", "durable"])
@pytest.mark.parametrize("if_exists", ["keep", "replace"])
def test_a_moved_root_is_noticed_within_a_second(
    clock: Clock,
    real_disk: Path,
    layout: Literal["block", "plain"],
    durability: Literal["visible", "durable"],
    if_exists: Literal["keep", "replace"],
) -> None:
    """The last receipt comes less than a second after the last check, also for a kept block."""
    root = real_disk / "kv"
    with kvio.open_store(
        "hybrid", root=root, layout=layout, durability=durability, create=True
    ) as store:
        store.write_block("k", b"data")
        root.rename(real_disk / "old")

        clock.now_s += 0.999
        assert store.write_block("k", b"data", if_exists=if_exists)
        assert all(result.ok for result in store.write_blocks([("k", b"data"), ("l", b"data")]))
        clock.now_s += 0.001
        with pytest.raises(kvio.RootMovedError, match=re.escape(str(real_disk / "old"))) as caught:
            store.write_block("k", b"data", if_exists=if_exists)
    assert caught.value.errno == errno.ENOENT
    assert type(pickle.loads(pickle.dumps(caught.value))) is kvio.RootMovedError


@pytest.mark.usefixtures("clock")
def test_a_removed_root_is_noticed_at_once(root: Path) -> None:
    """A write whose directory is gone does not wait for the second to say why."""
    with kvio.open_store("hybrid", root=root) as store:
        store.write_block("k", b"data")
        shutil.rmtree(root)

        for write in (WRITES["one piece"], WRITES["batch"]):
            with pytest.raises(kvio.RootMovedError, match="was removed"):
                write(store, "d/k")
        with pytest.raises(kvio.BlockNotFoundError):
            store.read_block("k")


def test_a_batch_keeps_what_it_knows_besides(clock: Clock, root: Path) -> None:
    """Blocks that failed for another reason keep their own error where the others lose theirs."""
    with kvio.open_store("hybrid", root=root) as store:
        store.write_block("k", b"data")
        root.rename(root.with_name("old"))
        clock.now_s += 1

        results = store.write_blocks([("k", b"data"), ("l", b"data")], if_exists="error")
    assert [type(result.error) for result in results] == [
        kvio.BlockExistsError,
        kvio.RootMovedError,
    ]
    assert [result.receipt for result in results] == [None, None]


def test_a_store_goes_on_when_its_root_is_back(clock: Clock, root: Path) -> None:
    """Reads go on meanwhile in the directory that was opened, and writes when it is back."""
    moved = root.with_name("old")
    with kvio.open_store("hybrid", root=root) as store:
        store.write_block("k", b"data")
        root.rename(moved)
        clock.now_s += 1
        with pytest.raises(kvio.RootMovedError):
            store.write_block("l", b"data")

        assert bytes(store.read_block("k")) == b"data"
        moved.rename(root)
        assert not store.write_block("m", b"data").existed
    assert "m" in {path.name for path in files(root)}


def test_another_way_to_the_same_directory_is_no_move(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that is made anew, and a working directory that changes, lead where they led."""
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("data")
    monkeypatch.chdir(tmp_path)
    with kvio.open_store("./link") as by_link, kvio.open_store("./data") as by_name:
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(tmp_path / "data")
        monkeypatch.chdir("/")
        clock.now_s += 1

        assert not by_link.write_block("k", b"data").existed
        assert by_name.write_block("k", b"data").existed


@pytest.mark.root
def test_mounts_decide_as_the_path_does(clock: Clock, tmp_path: Path) -> None:
    """A bind mount of the root is the root wherever that goes; what is mounted over it hides it."""
    children.need_root()
    data, bound = tmp_path / "data", tmp_path / "bound"
    data.mkdir(mode=0o700)
    bound.mkdir()

    def work() -> None:
        children.bind(data, bound)
        with kvio.open_store(bound) as by_bind, kvio.open_store(data) as by_name:
            data.rename(tmp_path / "old")
            clock.now_s += 1
            assert not by_bind.write_block("k", b"data").existed
            with pytest.raises(kvio.RootMovedError):
                by_name.write_block("l", b"data")
            children.hide(bound)
            clock.now_s += 1
            with pytest.raises(kvio.RootMovedError, match="another directory"):
                by_bind.write_block("m", b"data")

    children.in_child(work)


@pytest.mark.root
def test_a_path_that_may_not_be_looked_up_any_more_is_not_judged(
    clock: Clock, tmp_path: Path
) -> None:
    """A process that drops its privileges goes on with the root that it opened before."""
    children.need_root()
    root = tmp_path / "private" / "kv"

    def work() -> None:
        with kvio.open_store(root, create=True) as store:
            store.write_block("k", b"data")
            for path in (root, *root.rglob("*")):
                os.chown(path, 65534, 65534)
            children.become(65534)
            clock.now_s += 1
            with pytest.raises(PermissionError):
                os.stat(root)
            assert not store.write_block("l", b"data").existed

    children.in_child(work)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("move", ["moved", "replaced", "link pointed elsewhere"])
def test_a_forked_child_has_the_directory_of_its_parent(root: Path, move: str) -> None:
    """It neither makes the root anew nor takes another for it: it reads, and has no receipts."""
    with kvio.open_store("hybrid", root=root, create=True) as store:
        store.write_block("k", b"data")
        MOVES[move](root)
        before, there = files(root.parents[2]), root.exists()

        def work() -> None:
            assert bytes(store.read_block("k")) == b"data"
            with pytest.raises(kvio.RootMovedError):
                store.write_block("l", b"data")

        children.in_child(work)
    assert (files(root.parents[2]), root.exists()) == (before, there)


def test_a_store_that_writes_on_notices_by_itself(root: Path) -> None:
    """With the clock of the machine, and no call between but writes."""
    with kvio.open_store("hybrid", root=root) as store:
        store.write_block("k", b"data")
        root.rename(root.with_name("old"))

        write = partial(store.write_block, "k", b"data", if_exists="replace")
        with pytest.raises(kvio.RootMovedError):
            deque(iter(write, None), maxlen=0)  # for ever, but for the error


_SCRIPT: Final = """
import sys, kvio
from kvio.backends.posix import directories, engine, quick
directories.monotonic = engine.monotonic = quick.monotonic = lambda: 1000.0
with kvio.open_store("hybrid", root=sys.argv[1]) as store:
    for number in range(50):
        store.write_block(f"k{number}", b"data")
"""


def test_a_root_that_was_checked_costs_no_system_call(root: Path, tmp_path: Path) -> None:
    """Of fifty writes within a second one looks the path up."""
    log = tmp_path / "trace"
    command = strace.command(log, "-e", "trace=stat,newfstatat,statx")
    subprocess.run([*command, sys.executable, "-c", _SCRIPT, str(root)], check=True)

    lines = log.read_text().splitlines()
    assert len(strace.where(lines, re.escape(f'"{root}"'))) == 1
