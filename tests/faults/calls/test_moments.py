"""SIGKILL at random moments: single blocks, batches, deletions, repairs, threads, daemons, files.

The process says what it has a receipt for; whoever comes after it finds that, whole, and no more
than a sweep removes.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import kvio
from kvio.url import OptionValue
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.posix import faultlab
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES, Case
from tests.sharedfile.kills import test_moments as moments
from tests.staging.controlled import LONG_S
from tests.staging.daemon import test_kills as daemons
from tests.staging.daemon.daemons import socket_path

KILLS: Final = size(2, 40)
FILE_KILLS: Final = size(1, 12)
DAEMON_KILLS: Final = size(1, 25)
KEYS: Final = tuple(f"k{number}" for number in range(6))
_SIZES: Final = (0, 1, 700, 5_000, 70_000, 900_000)
#: Key's index, version; the highest bit of the version says that the key was deleted.
_SAID: Final = struct.Struct("<HI")
_GONE: Final = 1 << 31

pytestmark = pytest.mark.slow


def payload(key: int, version: int) -> bytes:
    """Return what a version of a key holds: its number, and bytes that follow from it."""
    dice = random.Random(f"{key}/{version}")
    return struct.pack("<I", version) + dice.randbytes(dice.choice(_SIZES))


class Work(NamedTuple):
    """What a process does until it is killed."""

    name: str
    turn: Callable[[kvio.Store, int, Callable[..., None]], None]
    options: dict[str, OptionValue]
    backend: str = "posix-tmpfile"


def _single(store: kvio.Store, version: int, say: Callable[..., None]) -> None:
    key = version % len(KEYS)
    store.write_block(KEYS[key], payload(key, version), if_exists="replace")
    say(key, version)


def _batch(store: kvio.Store, version: int, say: Callable[..., None]) -> None:
    items = [(KEYS[key], payload(key, version)) for key in range(len(KEYS))]
    for key, result in enumerate(store.write_blocks(items, if_exists="replace")):
        assert result.ok
        say(key, version)


def _delete(store: kvio.Store, version: int, say: Callable[..., None]) -> None:
    _batch(store, version, say)
    odd = [key for key in range(len(KEYS)) if key % 2]
    for key, result in zip(odd, store.delete_blocks([KEYS[key] for key in odd]), strict=True):
        assert result.ok
        say(key, version | _GONE)


def _repair(store: kvio.Store, version: int, say: Callable[..., None]) -> None:
    """Write over blocks that are broken: ``keep`` looks, and replaces them."""
    for key, name in enumerate(KEYS):
        path = faultlab.file_of(Path(store.url.path), name)
        if path.exists():
            os.truncate(path, path.stat().st_size // 2)
        else:
            assert version % 100_000 == 1, f"{path} is where nothing lies"
        store.write_block(name, payload(key, version), if_exists="keep")
        say(key, version)


def _threads(store: kvio.Store, version: int, say: Callable[..., None]) -> None:
    def one(key: int) -> None:
        store.write_block(KEYS[key], payload(key, version), if_exists="replace")
        say(key, version)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(len(KEYS))))


_DURABLE: Final[dict[str, OptionValue]] = {"durability": "durable"}
_RENAME: Final[dict[str, OptionValue]] = {"publish": "rename"}
WORKS: Final = (
    Work("single blocks", _single, {}),
    Work("single blocks by rename", _single, _RENAME),
    Work("single blocks, direct", _single, {}, "posix-direct"),
    Work("batches", _batch, {}),
    Work("batches, durable", _batch, _DURABLE),
    Work("batches by rename", _batch, _RENAME),
    Work("deletions", _delete, {}),
    Work("repairs", _repair, {}),
    Work("threads", _threads, _RENAME),
)


@pytest.fixture
def root(disk_path: Path) -> Path:
    """Return an empty directory on a disk, where there is one."""
    path = disk_path / "root"
    path.mkdir(mode=0o700)
    return path


def start(work: Work, root: Path, first: int) -> tuple[int, int]:
    """Fork a process that works for ever; its number, and where it says what it has done."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            url = f"{work.backend}://{root}"
            store = kvio.open_store(url, io_threads=2, options=work.options)

            def say(key: int, version: int) -> None:
                os.write(write_end, _SAID.pack(key, version))

            version = first
            while True:
                version += 1
                work.turn(store, version, say)
        finally:
            os._exit(70)
    os.close(write_end)
    return pid, read_end


def kill(work: Work, root: Path, first: int, dice: random.Random) -> list[tuple[int, int]]:
    """Let it work, kill it at some moment, and give what it said, in order: keys and versions."""
    pid, said = start(work, root, first)
    content = b""
    wanted = dice.randrange(1, 40) * _SAID.size
    while len(content) < wanted:
        piece = os.read(said, wanted - len(content))
        assert piece, f"{work.name}: it ended by itself (seed {seed()})"
        content += piece
    for _ in range(dice.randrange(40_000)):
        pass  # any moment of what it does next
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while piece := os.read(said, 1 << 16):
        content += piece
    os.close(said)
    return [
        (int(key), int(version))
        for key, version in _SAID.iter_unpack(content[: len(content) // _SAID.size * _SAID.size])
    ]


def check(work: Work, root: Path, said: list[tuple[int, int]]) -> None:
    """Check that every key is whole, and no older than what there was a receipt for.

    *said*: by this process and those before it.
    """
    last = dict(said)
    for key, name in enumerate(KEYS):
        try:
            stored = faultlab.peek(root, name)
        except AssertionError:
            # Cut by the worker itself, which had not come to write it anew: one at a time.
            cut = work.name == "repairs" and key == (said[-1][0] + 1) % len(KEYS)
            assert cut, f"{work.name}: {name} is torn"
            continue
        receipt = last.get(key)
        if stored is None:
            deleted = work.name == "deletions" and key % 2
            gone = receipt is None or receipt & _GONE or deleted
            assert gone, f"{work.name}: a receipt for {name} #{receipt}, but it is gone"
            continue
        (version,) = struct.unpack_from("<I", stored)
        assert stored == payload(key, version), f"{work.name}: {name} is torn"
        if receipt is not None:
            least = (receipt & ~_GONE) + (receipt >= _GONE)
            assert version >= least, f"{work.name}: {name} #{version}, but #{receipt} was reported"


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_a_process_killed_at_any_moment_loses_no_receipt(
    work: Work, root: Path, tally: Tally
) -> None:
    """Every key is whole and as new as was reported; the next store sweeps what is left."""
    dice = random.Random(f"{seed()} {work.name}")
    try:
        kvio.open_store(work.backend, root=root, options=work.options).close()
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    receipts = left = 0
    reported: list[tuple[int, int]] = []
    for turn in range(KILLS):
        said = kill(work, root, turn * 100_000, dice)
        reported += said
        check(work, root, reported)
        receipts += len(dict(said))
        left += len(faultlab.temporaries(root))
        with kvio.open_store(work.backend, root=root, options=work.options) as store:
            store.sweep()
            assert not faultlab.temporaries(root), "a sweep missed what was left"
            if work.name == "repairs":  # the next worker, too, finds no more than one torn
                for key, name in enumerate(KEYS):
                    store.write_block(name, payload(key, (turn + 1) * 100_000), if_exists="keep")
            assert all(store.verify_block(key).ok for key in store.list_keys())
    tally.add(kills=KILLS, receipts=receipts, lost=0, torn=0)
    print(f"{work.name}: {KILLS} kills, {receipts} receipts, {left} temporaries (seed {seed()})")


@pytest.mark.parametrize("case", CASES[:: size(4, 1)], ids=str)
def test_creators_and_writers_of_shared_files_killed_at_any_moment(
    case: Case, disk_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """No torn name; what is left is gone on with or removed: the shared files' own check."""
    refusal = kills.need_direct(case, disk_path)
    if refusal:
        pytest.skip(f"the temporary directory's file system lacks it: {refusal}")
    monkeypatch.setattr(moments, "KILLS", FILE_KILLS)
    monkeypatch.setattr(moments, "_SEED", seed())
    (disk_path / "a").mkdir()
    (disk_path / "b").mkdir()

    moments.test_a_creator_that_is_killed_tears_nothing(case, disk_path / "a")
    moments.test_the_rank_of_a_writer_that_is_killed_goes_on(case, disk_path / "b")

    tally.add(kills=2 * FILE_KILLS, torn=0)


@pytest.fixture
def path() -> Iterator[str]:
    """Where daemons listen."""
    with socket_path() as path:
        yield path


def test_clients_and_daemons_of_the_staging_tier_killed_at_any_moment(
    disk_path: Path, path: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """What a client saw accepted is stored; what a daemon's receipts say is, too."""
    monkeypatch.setattr(daemons, "KILLS", DAEMON_KILLS)
    monkeypatch.setattr(daemons, "_SEED", seed())
    url = f"hybrid://{disk_path}/store?create=true"

    daemons.test_a_client_that_is_killed_loses_nothing_that_was_accepted(url, path)
    daemons.test_a_daemon_that_is_killed_tears_nothing_and_fails_what_is_open(url, path)

    tally.add(kills=2 * DAEMON_KILLS + 1, lost=0, torn=0)


#: Spills an open file to disk beside a tier that is too small for it, and is killed at it.
_SPILLER: Final = """
import os, sys
import kvio
tier = kvio.stage(kvio.open_store(sys.argv[1]), capacity="64KiB", spool=sys.argv[2])
file = tier.open("large", "wb")
while True:
    file.write(os.urandom(50_000))
    os.write(1, b"w")
"""


def test_a_spool_dies_with_its_process(root: Path, disk_path: Path, tally: Tally) -> None:
    """Bytes that a tier spilled to disk have no name: whoever dies leaves none, and no block."""
    spool = disk_path / "spool"
    spool.mkdir()
    url = f"posix-tmpfile://{root}"
    dice = random.Random(seed())
    for _ in range(size(1, 20)):
        with subprocess.Popen(
            [sys.executable, "-c", _SPILLER, url, str(spool)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            for _ in range(dice.randrange(2, 12)):
                assert child.stdout.read(1) == b"w"
            child.kill()
            child.wait(LONG_S)
        assert list(spool.iterdir()) == []
        with kvio.open_store(url) as store:
            assert list(store.list_keys()) == []
            store.sweep()
        tally.add(kills=1, torn=0)
