"""A store against a process that exchanges its names for links; run by ``python -m`` it works.

Its arguments are a root, a layout and how many calls it makes; it prints what it did as JSON.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import kvio
from tests.faults.security import corpus
from tests.faults.sizes import seed
from tests.posix import faultlab

Layout: TypeAlias = Literal["block", "plain"]

KEYS: Final = tuple(f"a{number}/b" for number in range(8))
INSIDE: Final = b"inside"
OUTSIDE: Final = b"this was outside " * 20
#: What a file outside has that is linked hard: it may be read as a block, for it is one.
SHARED: Final = b"inside and outside"
ROOT: Final = Path(__file__).parents[3]
#: Exchanges directories and block files with links, as fast as it can, until its input ends.
SWAPPER: Final = """
import ctypes, os, select, sys
libc = ctypes.CDLL(None, use_errno=True)
traps = [line.split("\\t") for line in sys.stdin.readline().strip().split("\\v")]
print("ready", flush=True)
done = turn = 0
while turn < 2 or turn % 2 or not select.select([sys.stdin], [], [], 0)[0]:
    for one, other, kind, target in traps:
        if kind != "directory" and turn % 2 == 0:
            # Whoever wrote over the trap has destroyed it.
            os.unlink(other)
            (os.symlink if kind == "link" else os.link)(target, other)
        if libc.renameat2(-100, one.encode(), -100, other.encode(), 2):
            # The name is gone, because it was deleted: a link takes its place.
            try:
                os.link(other, one, follow_symlinks=False)
            except OSError:
                pass
        done += 1
    turn += 1
print(done, flush=True)
"""


class Trap(NamedTuple):
    """A name in the root, what it is exchanged for, and where that leads."""

    name: Path
    other: Path
    kind: Literal["directory", "link", "hard link"]
    target: Path


class Work(NamedTuple):
    """What a store did: calls that were done, and what came from outside."""

    done: int
    leaked: list[str]


@contextmanager
def swapping(traps: list[Trap]) -> Iterator[subprocess.Popen[str]]:
    """Let another process exchange names while this one goes on."""
    reported = "\v".join("\t".join(map(str, trap)) for trap in traps)
    with subprocess.Popen(
        [sys.executable, "-c", SWAPPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(reported + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            said, _ = process.communicate("\n", timeout=60)
        assert int(said) > 0, "nothing was exchanged"


def prepared(tmp_path: Path, layout: Layout) -> tuple[Path, Path, list[Trap]]:
    """Make a root with blocks, what is outside, and traps."""
    root, outside = tmp_path / "root", corpus.make_outside(tmp_path)
    traps = tmp_path / "traps"
    traps.mkdir()
    with kvio.open_store(
        "posix-tmpfile", root=root, layout=layout, options={"create": True}
    ) as store:
        store.write_blocks((key, INSIDE) for key in KEYS)
    return root, outside, [_trap(n, root, outside, traps, layout) for n in range(len(KEYS))]


def _trap(number: int, root: Path, outside: Path, traps: Path, layout: Layout) -> Trap:
    """Lay a trap: outside lies a whole block of the same name, for one who follows a link."""
    path = faultlab.file_of(root, KEYS[number], layout=layout)
    there, trap = outside / f"leaf{number}", traps / str(number)
    there.mkdir()
    content = SHARED if is_shared(KEYS[number]) else OUTSIDE
    sealed = content if layout == "plain" else faultlab.seal(content, KEYS[number])
    target = there / path.name
    target.write_bytes(sealed)
    match number % 4:
        case 0:
            trap.symlink_to(there)
            return Trap(path.parent, trap, "directory", there)
        case 1:
            trap.symlink_to(target)
            return Trap(path, trap, "link", target)
        case 2:
            trap.symlink_to(outside)
            upper = path.parent if layout == "plain" else path.parent.parent
            return Trap(upper, trap, "directory", outside)
    trap.hardlink_to(target)
    return Trap(path, trap, "hard link", target)


def is_shared(key: str) -> bool:
    """Return whether a key's file may be one that has a name outside too."""
    return KEYS.index(key) % 4 == 3


def work(root: Path, layout: Layout, rounds: int) -> Work:
    """Write, read, look, list, delete and sweep."""
    dice = random.Random(seed())
    leaked: list[str] = []
    done = 0
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
                done += 1
            if turn % 5 == 0:
                try:
                    store.sweep(older_than_s=0.0)
                except kvio.KvioError:
                    continue
    return Work(done, leaked)


def _one(store: kvio.Store, key: str, dice: random.Random) -> list[str]:
    good = (INSIDE, SHARED) if is_shared(key) else (INSIDE,)
    match dice.randrange(7):
        case 0 | 1:
            store.write_block(key, INSIDE, if_exists="replace")
        case 2:
            store.write_block(key, INSIDE)
        case 3 | 4:
            found = bytes(store.read_block(key))
            return [] if found in good else [f"{key}: {found[:40]!r}"]
        case 5:
            nbytes = store.stat_block(key).nbytes
            return [] if nbytes in map(len, good) else [f"{key}: a length from outside"]
        case _:
            store.delete_block(key)
    return []


def work_elsewhere(root: Path, layout: Layout, rounds: int, **env: str) -> Work:
    """Do the same in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(root), layout, str(rounds)],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Work(*json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))  # type: ignore[arg-type]
