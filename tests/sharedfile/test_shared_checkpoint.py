"""examples/shared_checkpoint.py does what it says, and notices when a file does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


def _run(command: tuple[str, ...], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        capture_output=True, check=False, timeout=120, text=True,
    )  # fmt: skip


def _run_example(*arguments: object) -> subprocess.CompletedProcess[str]:
    return _run((str(FOLDER / "shared_checkpoint.py"),), *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize("stripe_bytes", [0, 65536])
def test_processes_write_one_checkpoint(start: str, stripe_bytes: int, real_disk: Path) -> None:
    """Every part is read back as it was, and nothing is left."""
    done = _run_example(
        *("--root", real_disk, "--processes", 3, "--mib", 2, "--start", start),
        *("--stripe-bytes", stripe_bytes),
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "identical" in done.stdout
    assert "receipt: 2097152 bytes, durable" in done.stdout
    assert list(real_disk.iterdir()) == []


_PATCHED = """
import errno, sys
sys.path.insert(0, sys.argv[1])
import shared_checkpoint
from kvio import SharedFile
from kvio._native import faults
arguments = ["--root", sys.argv[2], "--processes", "2", "--mib", "1", "--start", "fork"]
"""
_WRONG = """
pread_into = SharedFile.pread_into
def wrong(self, out, offset=0):
    nbytes = pread_into(self, out, offset)
    out[-1] ^= 1
    return nbytes
SharedFile.pread_into = wrong
sys.exit(shared_checkpoint.main(arguments))
"""
_BROKEN = """
with faults.inject("write", error=errno.EIO):
    sys.exit(shared_checkpoint.main(arguments))
"""


@pytest.mark.slow
def test_a_part_with_one_wrong_bit_is_not_called_identical(real_disk: Path) -> None:
    """Exit status 1 and a visible word, even when the read reports success."""
    done = _run(("-c", _PATCHED + _WRONG), FOLDER, real_disk)

    assert (done.returncode, done.stderr) == (1, "")
    assert "DIFFERENT" in done.stdout


@pytest.mark.slow
def test_a_process_whose_disk_fails_ends_all(real_disk: Path) -> None:
    """Exit status 2; the rank and the reason are reported, no rate is, and nothing is left."""
    done = _run(("-c", _PATCHED + _BROKEN), FOLDER, real_disk)

    assert (done.returncode, done.stdout) == (2, "")
    assert "shared_checkpoint: rank " in done.stderr
    assert "Input/output error" in done.stderr
    assert list(real_disk.iterdir()) == []


@pytest.mark.slow
def test_a_user_s_mistake_is_one_line(real_disk: Path) -> None:
    """Exit status 2 and a sentence that says what is wrong."""
    for arguments, said in (
        (("--root", real_disk / "absent"), "absent"),
        (("--root", real_disk, "--stripe-bytes", 17), "stripes of 17 bytes"),
    ):
        done = _run_example(*arguments)

        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    assert list(real_disk.iterdir()) == []
