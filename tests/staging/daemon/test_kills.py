"""Clients and daemons killed at random points: nothing accepted is lost, and nothing is torn.

A handful of kills each; KVIO_KILLS=200 for many.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import kvio
from tests.staging.controlled import LONG_S
from tests.staging.daemon.blocks import block_of, number_of
from tests.staging.daemon.daemons import Process, socket_path, until

KILLS = int(os.environ.get("KVIO_KILLS", "4"))
_SEED = int(os.environ.get("KVIO_KILLS_SEED", "1"))
_ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture
def url(disk_path: Path) -> str:
    """Name a store on disk."""
    return f"hybrid://{disk_path}/store?create=true"


@pytest.fixture
def path() -> Iterator[str]:
    """Where daemons listen."""
    with socket_path() as path:
        yield path


def kill_a_client(url: str, path: str, seed: int, choose: random.Random) -> dict[str, int]:
    """Let a client write, kill it at any point, and give what it said was accepted."""
    lines = choose.randrange(1, 80)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.staging.daemon.writer", url, path, str(seed)],
        stdout=subprocess.PIPE,
        cwd=_ROOT,
    ) as client:
        assert client.stdout is not None
        said = b""
        while said.count(b"\n") < lines:
            piece = os.read(client.stdout.fileno(), choose.randrange(1, 100))
            assert piece, "the client ended by itself"
            said += piece
        for _ in range(choose.randrange(20_000)):
            pass  # any point of its next writes
        client.kill()
        said += client.stdout.read()
    accepted: dict[str, int] = {}
    for line in said.decode().splitlines():
        key, _, number = line.partition(" ")
        accepted[key] = int(number)
    return accepted


def check(read: kvio.Store | kvio.StagingTier, accepted: dict[str, int]) -> int:
    """Find every block no older than accepted, and whole; how many bytes."""
    nbytes = 0
    for key, number in accepted.items():
        block = read.read_block(key)
        nbytes += len(block)
        assert number_of(key, block) >= number, f"{key}: #{number} was accepted"
    return nbytes


def no_name_is_torn(url: str) -> str:
    """Look at every block, then at the disk itself: beside blocks only what a sweep removes."""
    with kvio.open_store(url) as store:
        keys = list(store.list_keys())
        for key in keys:
            number_of(key, store.read_block(key))
        swept = store.sweep()
        root = Path(store.url.path)
    names = [path.name for path in root.rglob("*") if path.is_file()]
    assert [name for name in names if name.startswith(".kvio-tmp-")] == []
    assert sorted(name for name in names if not name.startswith(".")) == sorted(
        key.replace("/", "~") for key in keys
    )
    return f"{len(keys)} names, 0 torn; {len(swept)} temporaries swept"


def test_a_client_that_is_killed_loses_nothing_that_was_accepted(url: str, path: str) -> None:
    """Whatever it was doing then, and its neighbours do not notice; nothing of it stays behind."""
    choose = random.Random(_SEED)
    nbytes = 0
    with Process(url, path, "--capacity", "3MiB", "--drain-threads", "2") as daemon:
        with kvio.open_store(url) as store, kvio.stage(store, daemon=path) as tier:
            for kill in range(KILLS):
                accepted = kill_a_client(url, path, kill, choose)
                tier.write_block("neighbour", block_of("neighbour", kill, 9_000))
                nbytes += check(tier, accepted)
                tier.barrier(timeout=LONG_S)
                for key in accepted:  # there is no room for all
                    assert tier.delete_block(key)
            until(lambda: not tier.stats().staged_blocks and not tier.stats().used_bytes)
        last = kill_a_client(url, path, KILLS, choose)
        assert daemon.end() == (0, "")

    with kvio.open_store(url) as store:
        nbytes += check(store, last)
    print(f"{KILLS + 1} clients killed, {nbytes} accepted bytes found, 0 lost")
    print(no_name_is_torn(url))


def test_a_daemon_that_is_killed_tears_nothing_and_fails_what_is_open(url: str, path: str) -> None:
    """What its receipts said was stored is, and the others' error names every key."""
    choose = random.Random(_SEED)
    open_in_all = 0
    for kill in range(KILLS):
        with Process(url, path, "--capacity", "3MiB", "--drain-threads", "2") as daemon:
            store = kvio.open_store(url)
            tier = kvio.stage(store, daemon=path, close_store=True)
            receipts = {}
            for number in range(choose.randrange(1, 60)):
                key = f"d{kill}/k{choose.randrange(12)}"
                data = block_of(key, number, choose.choice([1, 900, 70_000, 900_000]))
                receipts[number] = tier.write_block(key, data)
            for _ in range(choose.choice([0, choose.randrange(20_000)])):
                pass  # any point of its drains
            daemon.kill()
            open_in_all += look_at(tier, receipts)
            with suppress(kvio.TierNotDrainedError):
                tier.close(timeout=LONG_S)
    print(f"{KILLS} daemons killed, {open_in_all} receipts were open")
    print(no_name_is_torn(url))


def look_at(tier: kvio.StagingTier, receipts: dict[int, kvio.StagedReceipt]) -> int:
    """Compare what receipts say with the store; how many were open."""
    open_keys: set[str] = set()
    named: set[str] = set()
    for number, receipt in receipts.items():
        try:
            receipt.wait(timeout=LONG_S)
        except kvio.TierNotDrainedError as exc:
            open_keys.add(receipt.key)
            named.update(exc.keys)
        else:
            block = tier.store.read_block(receipt.key)
            assert number_of(receipt.key, block) >= number
    assert open_keys == named
    with pytest.raises(kvio.StorageError):
        tier.write_block("late", b"")
    return sum(receipt.error is not None for receipt in receipts.values())


def test_a_daemon_takes_the_place_of_one_that_was_killed(url: str, path: str) -> None:
    """The socket it left is no obstacle; a client stages anew."""
    with Process(url, path) as first:
        first.kill()
    assert os.path.exists(path)
    with Process(url, path, "--capacity", "1MiB") as second:
        assert second.ready.startswith("staging hybrid://")
        with kvio.open_store(url) as store, kvio.stage(store, daemon=path) as tier:
            tier.write_block("k", b"data")
        assert second.end() == (0, "")
    assert not os.path.exists(path)


#: Takes room and is killed, while a child that it forked lives on.
_PARENT = """
import os, signal, sys
import kvio
from kvio.staging.daemon import protocol as say
from tests.staging.engines import remote
tier = kvio.stage(kvio.open_store(sys.argv[1]), daemon=sys.argv[2])
with remote(tier).connections.line() as line:
    line.ask(say.Reserve("k", 9000, "keep", "raise", None))
    if os.fork() == 0:
        os.write(1, b"x")
        os.read(0, 1)
        os._exit(0)
    signal.sigwait([signal.SIGTERM])
"""


def test_a_child_of_a_killed_client_keeps_nothing_of_it(url: str, path: str) -> None:
    """Its copies of the connections are closed at the fork, so that the daemon sees the end."""
    with (
        Process(url, path, "--capacity", "1MiB") as daemon,
        kvio.open_store(url) as store,
        kvio.stage(store, daemon=path) as tier,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PARENT, url, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as client,
    ):
        assert client.stdout is not None
        assert client.stdout.read(1) == b"x"
        held = tier.stats().used_bytes
        client.kill()
        client.wait(LONG_S)
        while tier.stats().used_bytes:
            pass
        assert held == 3 * 4096
        tier.close()
        assert daemon.end() == (0, "")
