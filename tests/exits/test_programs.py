"""What a program accepted is stored when it ends without a close(), or the program says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvio

BLOCKS = 300
OPEN = f"""
import multiprocessing, os, signal, subprocess, sys, threading
import kvio

root, durability = sys.argv[1:]
BLOCK = bytes(range(256)) * 256


def opened():
    return kvio.open_store(
        "posix-tmpfile", root=root, durability=durability, layout="plain", io_threads=1
    )


def submit():
    store = opened()
    for n in range({BLOCKS}):
        store.submit_write(f"k{{n}}", BLOCK)
    return store


def stage(**options):
    tier = kvio.stage(opened(), "64MiB", drain_threads=1, **options)
    for n in range({BLOCKS}):
        tier.write_block(f"k{{n}}", BLOCK)
    return tier


"""


@pytest.fixture
def root(real_disk: Path) -> Path:
    """A root directory on a disk that makes blocks durable."""
    path = real_disk / "root"
    path.mkdir(mode=0o700)
    try:
        kvio.open_store("posix-tmpfile", root=path, durability="durable", layout="plain").close()
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system is not durable: {exc}")
    return path


def run(
    program: str, root: Path, durability: str = "visible", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        [sys.executable, "-c", OPEN + program, str(root), durability],
        capture_output=True, text=True, timeout=240, env=os.environ | environment,
    )  # fmt: skip


def intact(root: Path) -> int:
    """Count the blocks that are stored; each must be whole."""
    keys = [name for name in os.listdir(root) if not name.startswith(".")]
    with kvio.open_store("posix-tmpfile", root=root, layout="plain") as store:
        outs = [bytearray(1 << 16) for _ in keys]
        assert all(result.ok for result in store.read_blocks_into(zip(keys, outs, strict=True)))
    assert all(out == bytes(range(256)) * 256 for out in outs)
    return len(keys)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["visible", "durable"])
@pytest.mark.parametrize(
    ("accept", "end", "status"),
    [
        ("store = submit()", "", 0),
        ("submit()", "sys.exit(3)", 3),
        ("store = submit()", "raise ValueError", 1),
        ("tier = stage()", "", 0),
        ("stage()", "sys.exit(3)", 3),
        ("tier = stage(drain_from='high_water')", "raise ValueError", 1),
        ("tier = stage(); tier.pause()", "", 0),
    ],
)
def test_a_program_ends_when_what_it_accepted_is_stored(
    root: Path, durability: str, accept: str, end: str, status: int
) -> None:
    """Submitted or staged, to a store that is still held or was dropped, however it ends."""
    ended = run(f"{accept}\n{end}\n", root, durability)

    assert ended.returncode == status
    assert intact(root) == BLOCKS
    assert "kvio:" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("accept", ["submit", "stage"])
def test_a_child_of_multiprocessing_ends_when_what_it_accepted_is_stored(
    root: Path, how: str, accept: str
) -> None:
    """As with an executor of `concurrent.futures`."""
    child = OPEN.replace("sys.argv[1:]", repr((str(root), "visible"))) + f"kept = {accept}()"
    ended = run(
        f"""
if __name__ == "__main__":
    child = multiprocessing.get_context({how!r}).Process(target=exec, args=({child!r}, {{}}))
    child.start()
    child.join()
    sys.exit(child.exitcode)
""",
        root,
    )

    assert ended.returncode == 0, ended.stderr
    assert intact(root) == BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["submit", "stage"])
def test_what_was_not_done_in_time_is_reported(root: Path, accept: str) -> None:
    """After the time that the environment gives, in numbers."""
    ended = run(f"kept = {accept}()\n", root, "durable", KVIO_EXIT_TIMEOUT_S="0")
    (count,) = re.findall(rf"kvio: (\d+) .* of posix-tmpfile://{root} were not", ended.stderr)

    assert ended.returncode == 0
    assert int(count) > 0
    assert intact(root) + int(count) >= BLOCKS
    assert "KVIO_EXIT_TIMEOUT_S" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["soon", "nan", "-1"])
def test_a_time_that_is_none_is_refused_in_words(root: Path, wrong: str) -> None:
    """The program waits as long as without it."""
    ended = run("kept = submit()\n", root, KVIO_EXIT_TIMEOUT_S=wrong)

    assert f"KVIO_EXIT_TIMEOUT_S must be a number of seconds, not '{wrong}'" in ended.stderr
    assert intact(root) == BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accept", "waits"),
    [
        ("submit()", "kept._calls.executor._room._waiters"),
        ("stage()", "kept._engine.ledger.progress.goal and kept.stats().drained"),
    ],
)
def test_ctrl_c_ends_the_wait_and_says_what_is_lost(root: Path, accept: str, waits: str) -> None:
    """The exit status is the program's own."""
    ended = run(
        f"""
kept = {accept}


def watch():
    while not ({waits} and sum(name[0] != "." for name in os.listdir(root)) > 20):
        pass
    subprocess.run(["sh", "-c", f"kill -INT {{os.getpid()}}"], check=True)


signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=watch, daemon=True).start()
""",
        root,
        "durable",
    )
    (count,) = re.findall(rf"kvio: (\d+) .* of posix-tmpfile://{root} were not", ended.stderr)

    assert ended.returncode == 0
    assert intact(root) + int(count) >= BLOCKS
    assert int(count) < BLOCKS
    assert "a signal ended the wait" in ended.stderr


@pytest.mark.slow
def test_a_write_that_fails_at_the_end_is_reported(root: Path) -> None:
    """A program that does not look at its futures hears of it all the same."""
    ended = run(
        """
import errno
from kvio._native import faults

kept = opened()
stuck = faults.inject("open_temp", nth=2, times=1000, error=errno.ENOSPC)
stuck.__enter__()
for n in range(300):
    kept.submit_write(f"k{n}", BLOCK)
""",
        root,
        "durable",
    )

    assert intact(root) == 1
    assert re.search(r"kvio: \d+ operations of .* \(one failed: .*\) were not done", ended.stderr)


@pytest.mark.slow
def test_a_forked_child_leaves_its_parents_work_alone(root: Path) -> None:
    """It neither waits for it nor reports it, nor warns of what its parent opened."""
    ended = run(
        """
kept, tier = submit(), kvio.stage(opened(), "64MiB")
tier.write_block("staged", BLOCK)
tier.pause()
if os.fork() == 0:
    os.environ["KVIO_EXIT_TIMEOUT_S"] = "0"
    sys.exit()
os.wait()
""",
        root,
        "durable",
        PYTHONWARNINGS="error::ResourceWarning",
    )

    assert "kvio:" not in ended.stderr
    assert ended.stderr.count("was dropped, not closed") == ended.stderr.count("Exception ignored")
    assert ended.stderr.count("staging tier") == 1
    assert intact(root) == BLOCKS + 1
