"""Names that change into links while kvio works: what lies outside is neither changed nor read.

The store that follows links is compiled for the test: a C compiler is needed (Debian packages gcc
and libc6-dev).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio.backends.posix.directories import Directories
from tests.faults import mutants
from tests.faults.security import corpus
from tests.faults.security.races import Layout, Work, prepared, swapping, work, work_elsewhere
from tests.faults.sizes import size
from tests.faults.totals import Tally
from tests.posix import faultlab


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_links_that_come_and_go_lead_nowhere(layout: Layout, tmp_path: Path, tally: Tally) -> None:
    """Calls against a process that exchanges names for links: what is outside stays as it is."""
    root, outside, traps = prepared(tmp_path, layout)
    before = corpus.look_at(outside, tmp_path / "x")
    rounds = size(1000, 40_000)
    with swapping(traps):
        done, leaked = work(root, layout, rounds)

    print(f"{done} of {rounds} calls were done")
    tally.add(rounds=done)
    assert leaked == []
    assert corpus.look_at(outside, tmp_path / "x") == before
    assert done > rounds // 20


def _is_found(
    tmp_path: Path, layout: Layout, broken: Callable[[Path, Layout, int], Work], times: int = 50
) -> bool:
    """Let a broken store work until it is found, or so many times."""
    root, outside, traps = prepared(tmp_path, layout)
    before = corpus.look_at(outside)
    with swapping(traps):
        for _ in range(times):  # a busy machine may not let the other process run for a while
            if broken(root, layout, 400).leaked or corpus.look_at(outside) != before:
                return True
    return False


def _follows(self: Directories, directory: str, *, create: bool) -> int:
    """Open a directory as one does who never heard of links."""
    if create:
        os.makedirs(f"/proc/self/fd/{self.rootfd}/{directory}", mode=0o700, exist_ok=True)
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.rootfd)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_a_store_that_follows_links_of_directories_is_found(
    layout: Layout, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same by a store that opens directories through links reaches outside, and is seen."""
    tally.add(mutants=1)
    monkeypatch.setattr(Directories, "_open_anew", _follows)
    found = _is_found(tmp_path, layout, work)
    tally.add(caught=found)
    assert found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_a_store_that_follows_links_of_blocks_is_found(
    layout: Layout, tmp_path: Path, tally: Tally
) -> None:
    """The same by a store that opens blocks through links reads outside, and is seen."""
    tally.add(mutants=1)
    source = Path(__file__).with_name("careless.c")
    library = mutants.compile_c(source, tmp_path / "careless.so", "-shared", "-fPIC")

    def broken(root: Path, layout: Layout, rounds: int) -> Work:
        env = {"LD_PRELOAD": str(library), "KVIO_CARELESS": "follows"}
        return work_elsewhere(root, layout, rounds * 5, **env)

    found = _is_found(tmp_path, layout, broken, 10)
    tally.add(caught=found)
    assert found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_a_store_that_writes_in_place_is_found(
    layout: Layout, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that writes into the file that has a name changes one outside by a hard link."""
    tally.add(mutants=1)
    publish = kvio.Store.write_block

    def write_block(self: kvio.Store, key: str, data: bytes, **how: Any) -> object:
        path = faultlab.file_of(tmp_path / "root", key, layout=layout)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        except OSError:
            return publish(self, key, data, **how)
        with os.fdopen(fd, "wb") as file:
            file.write(data if layout == "plain" else faultlab.seal(data, key))
        return None

    def broken(root: Path, layout: Layout, rounds: int) -> Work:
        monkeypatch.setattr(kvio.Store, "write_block", write_block)
        return work(root, layout, rounds)

    found = _is_found(tmp_path, layout, broken)
    tally.add(caught=found)
    assert found


def test_a_hard_link_in_the_root_is_not_written_through(tmp_path: Path, tally: Tally) -> None:
    """A block's name that is a file from outside: it is unlinked or replaced, never written."""
    outside = corpus.make_outside(tmp_path)
    before = corpus.look_at(outside)
    for layout in ("block", "plain"):
        root = tmp_path / layout
        with kvio.open_store(
            "posix-tmpfile", root=root, layout=layout, options={"create": True}
        ) as store:
            for number in range(size(30, 500)):
                key = f"k/{number}"
                store.write_block(key, b"inside")
                path = faultlab.file_of(root, key, layout=layout)
                path.unlink()
                path.hardlink_to(outside / "secret")
                match number % 4:
                    case 0:
                        store.write_block(key, b"inside", if_exists="replace")
                    case 1:
                        store.write_block(key, b"inside")
                    case 2:
                        assert store.delete_block(key)
                    case _:
                        store.sweep(older_than_s=0.0)
                tally.add(rounds=1)
    assert corpus.look_at(outside) == before


_CALLS: Final[tuple[Callable[[Path], object], ...]] = (
    lambda at: kvio.SharedFile.create(at, 8192, durability="visible").abort(),
    lambda at: kvio.SharedFile.open(at, 0).close(),
    lambda at: kvio.SharedFile.open(at).close(),
    lambda at: kvio.SharedFile.recover(at).abort(),
)


def test_a_linked_map_of_a_shared_file_is_not_followed(tmp_path: Path, tally: Tally) -> None:
    """Links under the names of a shared file's parts: nobody joins, and outside stays as it is."""
    outside = corpus.make_outside(tmp_path)
    before = corpus.look_at(outside)
    for name in (".f.kvio-map", ".f.kvio-data", "f"):
        folder = tmp_path / f"at{name}"
        folder.mkdir()
        (folder / name).symlink_to(outside / "secret")
        for call in _CALLS:
            tally.add(names=1)
            try:
                call(folder / "f")
            except kvio.KvioError:
                continue
    assert corpus.look_at(outside) == before
