"""`kvio shared`: it says what there is, finishes what is whole, and removes only what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvio
from kvio import KiB, SharedFile
from tests.cli.running import SCRIPT, complaint, run
from tests.sharedfile import kills, raw

SIZE = 300_001
DATA = raw.random_bytes(SIZE)
OPTIONS = {"writers": 3, "cell_bytes": 64 * KiB, "durability": "visible"}


def leave(path: Path, nbytes: int = SIZE, **options: object) -> None:
    """Leave a file of which the first bytes are written, by a process that is killed."""

    def work() -> None:
        file = SharedFile.create(path, SIZE, **{**OPTIONS, **options})  # type: ignore[arg-type]
        file.pwrite(DATA[:nbytes], 0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert kills.killed(kills.in_child(work))


def seal(path: Path, **options: object) -> Path:
    """Seal a file."""
    with SharedFile.create(path, SIZE, **{**OPTIONS, **options}) as file:  # type: ignore[arg-type]
        file.pwrite(DATA, 0)
        file.seal()
    return path


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, "in the file"),
        ({"layout": "plain", "sidecar": True}, "in a sidecar"),
        ({"checksum": False}, "none"),
    ],
    ids=["block", "sidecar", "none"],
)
def test_a_sealed_file_is_described(disk_path: Path, options: dict[str, object], kept: str) -> None:
    """Size, writers, and where its checksums are."""
    path = seal(disk_path / "f", **options)
    done = run("shared", "status", path)

    assert done.returncode == 0, done
    lines = done.stdout.decode().splitlines()
    assert lines[0] == f"{path}: sealed"
    assert "300001 bytes" in lines[1]
    assert lines[2:] == ["  writers    3", f"  checksums  {kept}"]


def test_status_does_not_change_a_file_that_is_being_written(disk_path: Path) -> None:
    """Status prints the writers as lines and as JSON; the file can be sealed afterwards."""
    path = disk_path / "f"
    with SharedFile.create(path, SIZE, **OPTIONS) as file:  # type: ignore[arg-type]
        first = file.domain(0)[0].nbytes
        file.pwrite(DATA[:first], 0)
        with SharedFile.open(path, 1):
            done = run("shared", "status", path)
            found = json.loads(run("shared", "status", path, "--json").stdout)
            for command in ("recover", "abort"):
                assert "is being written" in complaint(run("shared", command, path), 2)
        file.pwrite(DATA[first:], first)
        file.seal()

    text = done.stdout.decode()
    assert text.startswith(f"{path}: being written, ")
    assert "rank 1     being written, " in text
    assert "rank 2     no writer, " in text
    assert "rank 0 " not in text
    assert "no process seals it" not in text
    assert (found["state"], found["writing"], found["sealer"]) == ("open", [0, 1], True)
    assert set(found["owed"]) == {"1", "2"}
    assert found["owed_bytes"] == SIZE - first
    assert kills.check_name(path, DATA)


def test_recover_seals_a_complete_file(disk_path: Path) -> None:
    """The creator died before the seal; a second recover reports that the file is sealed."""
    path = disk_path / "f"
    leave(path)
    said = run("shared", "status", path).stdout.decode()
    done = run("shared", "recover", path)

    assert "left unfinished by a process that is gone, nothing missing" in said
    assert f"kvio shared recover {path}" in said
    assert done.returncode == 0, done
    assert f"crc32c {raw.crc32c(DATA):08x}" in done.stdout.decode()
    assert kills.check_name(path, DATA)
    again = run("shared", "recover", path)
    assert (again.returncode, again.stdout.decode()) == (0, f"{path} was already sealed\n")


def test_recover_keeps_an_incomplete_file_until_it_is_aborted(disk_path: Path) -> None:
    """Recover prints the missing bytes and keeps the written ones; abort removes the file."""
    path = disk_path / "f"
    leave(path, 100_000)
    for _ in range(2):
        done = run("shared", "recover", path)
        assert done.returncode == 1, done
        assert f"kvio shared abort {path}" in done.stderr.decode()
        assert b"missing 65536 bytes from 102400, of rank 1\n" in done.stdout
    with SharedFile.recover(path) as file:
        assert sum(piece.nbytes for piece in file.missing()) < SIZE
    done = run("shared", "abort", path)

    assert (done.returncode, os.listdir(disk_path)) == (0, [])
    assert "no shared file" in complaint(run("shared", "abort", path), 1)


def test_an_interrupted_recover_removes_nothing(disk_path: Path) -> None:
    """After Ctrl-C during the verification, the next recover seals the file."""
    path = disk_path / "f"
    leave(path)
    program = f"""
import os, signal, sys
from kvio import cli
from kvio.sharedfile import lifecycle
def interrupted(*_):
    os.kill(os.getpid(), signal.SIGINT)
lifecycle._read_again = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = ["shared", "recover", {str(path)!r}]
sys.exit(cli.main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert done.returncode == 130, done
    assert run("shared", "recover", path).returncode == 0
    assert kills.check_name(path, DATA)


def test_a_sealed_file_is_not_aborted(disk_path: Path) -> None:
    """A sealed file is an ordinary file."""
    path = seal(disk_path / "f")

    assert "is sealed: remove it with rm" in complaint(run("shared", "abort", path), 2)
    assert kills.check_name(path, DATA)


@pytest.mark.parametrize("options", [{}, {"layout": "plain", "sidecar": True}], ids=str)
def test_a_changed_byte_is_found(disk_path: Path, options: dict[str, object]) -> None:
    """Verify exits with 0; after a change it exits with 1 and prints the position."""
    path = seal(disk_path / "f", **options)
    done = run("shared", "verify", path)
    assert (done.returncode, done.stdout) == (0, f"{path}: 6 cells checked, 0 bad\n".encode())
    raw.flip(path, 70_000)
    done = run("shared", "verify", path, "--threads", 3)

    assert done.returncode == 1, done
    assert b"bad bytes 65536 to " in done.stdout
    assert b": 6 cells checked, 1 bad\n" in done.stdout


def test_files_that_cannot_be_verified_are_errors(disk_path: Path) -> None:
    """A file without checksums, a file that is no shared file, and a missing file."""
    path = seal(disk_path / "f", checksum=False)
    other = disk_path / "other"
    other.write_bytes(DATA)

    assert "without checksums" in complaint(run("shared", "verify", path), 2)
    for command in ("verify", "status"):
        assert "has no sidecar" in complaint(run("shared", command, other), 1)
        assert "no shared file" in complaint(run("shared", command, disk_path / "none"), 1)
    assert "open the directory" in complaint(run("shared", "status", disk_path / "no" / "x"), 2)


@pytest.mark.parametrize("command", ["status", "verify", "recover", "abort"])
def test_each_has_help_with_an_example(command: str) -> None:
    """The help has an example and the exit statuses."""
    text = " ".join(run("shared", command, "--help").stdout.decode().split())

    assert f"kvio shared {command} " in text
    assert "Exit status" in text
    assert SCRIPT.exists()


def test_a_file_of_another_boot_is_described(disk_path: Path) -> None:
    """Bytes written before a reboot do not count as written."""
    path = disk_path / "f"
    leave(path)
    kills.forge_boot(kills.map_of(path))
    said = run("shared", "status", path).stdout.decode()

    assert "left unfinished before this machine was started" in said
    assert not SharedFile.status(path).this_boot
    with pytest.raises(kvio.UnsupportedError):
        SharedFile.open(path, 0)
