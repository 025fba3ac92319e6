"""Inputs and blocks that no memory has to hold: pipes, devices, large files."""

from __future__ import annotations

import array
import fcntl
import os
import random
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO

import pytest

import kvio
from tests.cli.running import SCRIPT, complaint, file_of, flip_a_bit, kvio_crc32c, run
from tests.posix import mounts

pytestmark = pytest.mark.slow

MiB = kvio.MiB
#: Longer than what is held, and than the address space that the command has left.
LONG = 300 * MiB + 5
SPARE = 160 * MiB

_LIMITED = """
import os, resource, sys
from kvio.cli.app import run
import kvio.backends.posix
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
limit = taken + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(run(sys.argv[2:]))
"""


def run_limited(
    *arguments: object, stdin: IO[bytes] | int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[bytes]:
    """Run kvio with so much address space beyond what it has when it starts."""
    return subprocess.run(
        [sys.executable, "-c", _LIMITED, str(SPARE), *map(str, arguments)],
        stdin=stdin,
        capture_output=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "input"
    piece = random.Random(5).randbytes(MiB)
    with path.open("wb") as file:
        while file.tell() < LONG:
            file.write(piece[: LONG - file.tell()])
    return path


def crc_of(path: Path) -> str:
    return f"{kvio_crc32c(path.read_bytes()):08x}"


@pytest.mark.parametrize("backend", ["hybrid", "posix-tmpfile"])
def test_what_no_memory_holds_is_stored_and_comes_back(
    store: Path, long_file: Path, tmp_path: Path, backend: str
) -> None:
    """A pipe and a file longer than all memory are stored and read, each checked to the end."""
    url = f"{backend}://{store}"
    with subprocess.Popen(["cat", long_file], stdout=subprocess.PIPE) as producer:
        assert producer.stdout is not None
        piped = run_limited("put", url, "piped", "-", stdin=producer.stdout)
    named = run_limited("put", url, "named", long_file)
    got = run_limited("get", url, "piped", tmp_path / "out")

    for done in (piped, named):
        assert done.returncode == 0, done.stderr
        assert f"{LONG} bytes, visible".encode() in done.stdout
        assert crc_of(long_file).encode() in done.stdout
    assert got.returncode == 0, got.stderr
    assert subprocess.run(["cmp", long_file, tmp_path / "out"], check=False).returncode == 0
    with subprocess.Popen(
        [sys.executable, "-c", _LIMITED, str(SPARE), "get", url, "named", "-"],
        stdout=subprocess.PIPE,
    ) as reader:
        compared = subprocess.run(["cmp", long_file, "-"], stdin=reader.stdout, check=False)
    assert (compared.returncode, reader.returncode) == (0, 0)


@pytest.mark.root
@pytest.mark.parametrize("options", ["", "durability=durable", "publish=rename"])
def test_an_input_without_end_ends_with_the_disk_and_leaves_nothing(
    tmp_path: Path, options: str
) -> None:
    """`yes` and /dev/zero fill a small file system; the error says so, and the room is back."""
    with mounts.loop_filesystem("ext4", tmp_path, "-N", "2048", size_mib=100) as root:
        run("put", f"hybrid://{root}?{options}", "first", stdin=b"abc")
        files, free = sorted(root.rglob("*")), mounts.free_bytes(root)
        for arguments, program in (("-", ["yes"]), ("/dev/zero", ["true"])):
            with subprocess.Popen(program, stdout=subprocess.PIPE) as producer:
                assert producer.stdout is not None
                done = run_limited(
                    "put", f"hybrid://{root}?{options}", "key", arguments, stdin=producer.stdout
                )
                producer.stdout.close()
            assert "'key': No space left on device (ENOSPC)" in complaint(done, 2)

        assert [path for path in root.rglob("*") if path not in files and path.is_file()] == []
        assert mounts.lost_bytes(free, lambda: mounts.free_bytes(root), MiB) <= MiB
        assert run("put", f"hybrid://{root}?{options}", "key", stdin=b"abc").returncode == 0


def test_a_taken_key_is_treated_as_that_of_any_put(store: Path, tmp_path: Path) -> None:
    """A long input keeps, replaces or refuses what has its key, from a pipe and from a file."""
    path = tmp_path / "input"
    old, new, longer = (bytes((n,)) * (70 * MiB + n // 3) for n in (1, 2, 3))
    run("put", store, "k", stdin=old)
    for content, policy, begins, stored in (
        (new, "keep", b"kept", old),
        (longer, "keep", b"stored", longer),
        (new, "error", b"", longer),
        (old, "replace", b"stored", old),
    ):
        path.write_bytes(content)
        for stdin, file in ((content, "-"), (None, path)):
            done = run("put", store, "k", file, "--if-exists", policy, stdin=stdin)
            again = policy == "keep" and begins == b"stored" and file is path
            assert done.stdout.startswith(b"kept" if again else begins), done
            assert done.returncode == (2 if policy == "error" else 0)
            assert file_of(store, "k").read_bytes().startswith(stored)


def test_a_directory_of_large_and_small_files_is_stored(store: Path, tmp_path: Path) -> None:
    """Files that are too long to be held with others are stored one by one."""
    source = tmp_path / "in"
    source.mkdir()
    contents = {f"f{n}": bytes((n,)) * nbytes for n, nbytes in enumerate((5, 65 * MiB, 40 * MiB))}
    contents |= {"f7": b"7" * (40 * MiB), "f8": b""}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    put = run("put", "-r", store, "x", source)
    got = run("get", "--prefix", store, "x/", tmp_path / "out")

    assert (put.returncode, got.returncode) == (0, 0), (put, got)
    assert put.stdout.startswith(b"stored 5 of 5 blocks")
    for name, content in contents.items():
        assert (tmp_path / "out/x" / name).read_bytes() == content


def test_a_damaged_long_block_is_not_given_out(store: Path, tmp_path: Path) -> None:
    """Not a byte of it goes to a pipe, and no file is left, whichever piece is damaged."""
    run("put", store, "a/k", stdin=bytes(40 * MiB))
    flip_a_bit(file_of(store, "a/k"), 39 * MiB)
    piped = run("get", store, "a/k", "-")
    filed = run("get", store, "a/k", tmp_path / "out")
    many = run("get", "--prefix", store, "a/", tmp_path / "many")

    for done in (piped, filed):
        assert "is corrupt: the payload's checksum is wrong" in complaint(done, 1)
    assert many.returncode == 1
    assert piped.stdout == b""
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_range_of_a_long_block_comes_piece_by_piece(store: Path) -> None:
    """A range longer than a piece is the bytes that it names."""
    data = random.Random(3).randbytes(50 * MiB)
    run("put", store, "k", stdin=data)

    assert run("get", store, "k", "-", "--offset", 7).stdout == data[7:]
    part = run("get", store, "k", "-", "--offset", 7, "--nbytes", 20 * MiB)
    assert part.stdout == data[7 : 7 + 20 * MiB]


def test_a_file_whose_length_only_reading_tells_is_stored(store: Path) -> None:
    """Files of /proc say that they are empty."""
    run("put", store, "k", "/proc/version")

    assert run("get", store, "k", "-").stdout == Path("/proc/version").read_bytes()


def test_standard_input_that_does_not_wait_is_waited_for(store: Path) -> None:
    """A pipe in non-blocking mode that is empty for now is not at its end."""
    out, into = os.pipe()
    os.set_blocking(out, False)
    with subprocess.Popen([SCRIPT, "put", store, "k"], stdin=out) as process:
        os.write(into, b"first")
        waiting = array.array("i", [1])
        while waiting[0]:
            fcntl.ioctl(out, termios.FIONREAD, waiting)
        os.write(into, b"second")
        os.close(into)
    os.close(out)

    assert process.returncode == 0
    assert run("get", store, "k", "-").stdout == b"firstsecond"
