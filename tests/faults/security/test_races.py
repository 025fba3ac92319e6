"""Names that change into links while kvio works: what lies outside is neither changed nor read."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import pytest

import kvio
from kvio.backends.posix.layout import Directories
from tests.faults.security import corpus
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.posix import faultlab

KEYS: Final = tuple(f"a{number}/b" for number in range(6))
OUTSIDE: Final = b"this was outside " * 20
#: Exchanges directories and block files with links, as fast as it can, until its input ends.
SWAPPER: Final = """
import ctypes, os, select, sys
libc = ctypes.CDLL(None, use_errno=True)
pairs = [line.split("\\t") for line in sys.stdin.readline().strip().split("\\v")]
print("ready", flush=True)
done = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for one, other in pairs:
        if libc.renameat2(-100, one.encode(), -100, other.encode(), 2):
            # The name is gone, because it was deleted: a link takes its place.
            try:
                os.link(other, one, follow_symlinks=False)
            except OSError:
                pass
        done += 1
print(done, flush=True)
"""


@contextmanager
def swapping(pairs: list[tuple[Path, Path]]) -> Iterator[subprocess.Popen[str]]:
    """Let another process exchange names while this one goes on."""
    told = "\v".join(f"{one}\t{other}" for one, other in pairs)
    with subprocess.Popen(
        [sys.executable, "-c", SWAPPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(told + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            said, _ = process.communicate("\n", timeout=60)
        assert int(said) > 0, "nothing was exchanged"


def prepared(
    tmp_path: Path, layout: Literal["block", "plain"]
) -> tuple[Path, Path, list[tuple[Path, Path]]]:
    """Make a root with blocks, what is outside, and pairs of names to exchange."""
    root, outside = tmp_path / "root", corpus.make_outside(tmp_path)
    traps = tmp_path / "traps"
    traps.mkdir()
    with kvio.open_store(
        "posix-tmpfile", root=root, layout=layout, options={"create": True}
    ) as store:
        store.write_blocks((key, b"inside") for key in KEYS)
    pairs = []
    for number, key in enumerate(KEYS):
        path = faultlab.file_of(root, key, layout=layout)
        # Outside lies a whole block of the same name, so that one who follows a link finds it.
        there = outside / f"leaf{number}"
        there.mkdir()
        content = OUTSIDE if layout == "plain" else faultlab.seal(OUTSIDE, key)
        (there / path.name).write_bytes(content)
        trap = traps / str(number)
        match number % 3:
            case 0:
                trap.symlink_to(there)
                pairs.append((path.parent, trap))
            case 1:
                trap.symlink_to(there / path.name)
                pairs.append((path, trap))
            case _:
                upper = traps / f"{number}-upper"
                upper.symlink_to(outside)
                pairs.append((path.parent if layout == "plain" else path.parent.parent, upper))
    return root, outside, pairs


def work(root: Path, layout: Literal["block", "plain"], rounds: int) -> list[str]:
    """Write, read, look, list, delete and sweep; what came from outside."""
    dice = random.Random(seed())
    leaked = []
    for turn in range(-(-rounds // 40)):
        # Opened anew: the directories are looked up again.
        try:
            store = kvio.open_store("posix-tmpfile", root=root, layout=layout)
        except kvio.KvioError:
            continue
        with store:
            for _ in range(40):
                key = dice.choice(KEYS)
                try:
                    leaked += _one(store, key, dice)
                except kvio.KvioError:
                    continue
            if turn % 5 == 0:
                try:
                    store.sweep(older_than_s=0.0)
                except kvio.KvioError:
                    continue
    return leaked


def _one(store: kvio.Store, key: str, dice: random.Random) -> list[str]:
    match dice.randrange(7):
        case 0 | 1:
            store.write_block(key, b"inside", if_exists="replace")
        case 2:
            store.write_block(key, b"inside")
        case 3 | 4:
            found = bytes(store.read_block(key))
            return [] if found == b"inside" else [f"{key}: {found[:40]!r}"]
        case 5:
            return [] if store.stat_block(key).nbytes == 6 else [f"{key}: a length from outside"]
        case _:
            store.delete_block(key)
    return []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_links_that_come_and_go_lead_nowhere(
    layout: Literal["block", "plain"], tmp_path: Path, tally: Tally
) -> None:
    """Calls against a process that exchanges names for links: what is outside stays as it is."""
    root, outside, pairs = prepared(tmp_path, layout)
    before = corpus.look_at(outside, tmp_path / "x")
    rounds = size(1000, 40_000)
    with swapping(pairs):
        leaked = work(root, layout, rounds)

    tally.add(states=rounds, torn=len(leaked))
    assert leaked == []
    assert corpus.look_at(outside, tmp_path / "x") == before


def _follows(self: Directories, directory: str, *, create: bool) -> int:
    """Open a directory as one does who never heard of links."""
    if create:
        os.makedirs(f"/proc/self/fd/{self.rootfd}/{directory}", mode=0o700, exist_ok=True)
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.rootfd)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_a_store_that_follows_links_is_found(
    layout: Literal["block", "plain"],
    tmp_path: Path,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same by a store that opens directories through links reaches outside, and is seen."""
    root, outside, pairs = prepared(tmp_path, layout)
    before = corpus.look_at(outside)
    monkeypatch.setattr(Directories, "_open_anew", _follows)
    found = False
    with swapping(pairs):
        for _ in range(50):  # a busy machine may not let the other process run for a while
            leaked = work(root, layout, 400)
            found = bool(leaked) or corpus.look_at(outside) != before
            if found:
                break

    tally.add(mutants=1, caught=found)
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
                tally.add(states=1)
    assert corpus.look_at(outside) == before


_CALLS: Final[tuple[Callable[[Path], object], ...]] = (
    lambda at: kvio.SharedFile.create(at, 8192, durability="visible").abort(),
    lambda at: kvio.SharedFile.open(at, 0).close(),
    lambda at: kvio.SharedFile.open(at).close(),
    lambda at: kvio.SharedFile.recover(at).abort(),
)


def test_a_linked_map_of_a_shared_file_is_not_followed(tmp_path: Path) -> None:
    """Links under the names of a shared file's parts: nobody joins, and outside stays as it is."""
    outside = corpus.make_outside(tmp_path)
    before = corpus.look_at(outside)
    for name in (".f.kvio-map", ".f.kvio-data", "f"):
        folder = tmp_path / f"at{name}"
        folder.mkdir()
        (folder / name).symlink_to(outside / "secret")
        for call in _CALLS:
            try:
                call(folder / "f")
            except kvio.KvioError:
                continue
    assert corpus.look_at(outside) == before
