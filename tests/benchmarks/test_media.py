"""Doctor and tune on fresh file systems: what they say is tabled, and nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness.filesystems import KINDS
from benchmarks.harness.run import Limits
from benchmarks.scenarios import media
from kvio.diagnostics import tuning
from tests.media import IN_MEMORY, filesystem_of

Content = list[dict[str, Any]]


@pytest.fixture
def disk() -> Iterator[Path]:
    """Yield a directory on a disk, where loop devices can use direct I/O."""
    with tempfile.TemporaryDirectory(prefix="kvio-test-", dir="/var/tmp") as name:
        if filesystem_of(Path(name)) in IN_MEMORY:
            pytest.skip("needs a disk file system under /var/tmp")
        yield Path(name)


@pytest.fixture
def clean(disk: Path) -> Iterator[Path]:
    """Yield a root in which nothing may be mounted, looped or left after the test."""
    if os.geteuid():
        pytest.skip("needs root, to mount")
    root = disk / "root"
    root.mkdir()
    yield root

    assert str(root) not in Path("/proc/self/mountinfo").read_text()
    pause, deadline = threading.Event(), time.monotonic() + 10.0
    while str(root) in _loops() and time.monotonic() < deadline:
        pause.wait(0.02)  # the kernel gives a device back some time after its mount
    assert str(root) not in _loops()
    assert list(root.iterdir()) == []


def _loops() -> str:
    """List what loop devices are made of, by the kernel's own files."""
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    found = []
    for path in files:
        with contextlib.suppress(OSError):  # the device was given back meanwhile
            found.append(path.read_text())
    return "".join(found)


def _limits(root: Path, **changes: Any) -> Limits:
    values: dict[str, Any] = {"results": root.parent / "results", "budget_s": 1.0, "max_rounds": 1}
    return Limits(root=root, **(values | changes))


def _recorded(root: Path) -> Any:
    return json.loads((root.parent / "results" / "media.json").read_text())


def _row(root: Path) -> dict[str, str]:
    """Read the only row of the Markdown table."""
    lines = (root.parent / "results" / "media.md").read_text().splitlines()
    headings, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    )
    (row,) = rows
    return dict(zip(headings, row, strict=True))


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make programs the only ones on the path; gives their directory."""

    def limit(*programs: str) -> Path:
        directory = tmp_path / "programs"
        directory.mkdir()
        for program in programs:
            found = shutil.which(program)
            if found is None:
                pytest.skip(f"needs {program}")
            (directory / program).symlink_to(found)
        monkeypatch.setenv("PATH", str(directory))
        return directory

    return limit


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([(None, "buffered")], "always buffered"),
        ([(None, "direct")], "always direct"),
        ([(256 << 10, "buffered"), (None, "direct")], "direct from 256 KiB"),
        ([(65536, "dontcache"), (None, "direct")], "dontcache below 64 KiB, direct from 64 KiB"),
        (
            [(65536, "buffered"), (1 << 20, "dontcache"), (None, "direct")],
            "dontcache from 64 KiB, direct from 1 MiB",
        ),
        (
            [(8192, "direct"), (3 << 19, "buffered"), (None, "direct")],
            "direct below 8 KiB, buffered from 8 KiB, direct from 1.5 MiB",
        ),
        ([(4096, "direct"), (8192, "direct"), (None, "direct")], "always direct"),
    ],
)
def test_steps_of_a_calibration_are_put_into_words(
    steps: list[tuple[int | None, str]], words: str
) -> None:
    """Each mode is named with the size it begins at; buffered below the first is understood."""
    content = [{"below_nbytes": below, "mode": mode} for below, mode in steps]

    assert media.thresholds({"1": content}) == words


def test_sizes_above_the_last_step_are_said_to_be_buffered() -> None:
    """A table that ends with a limit means what the policy makes of it."""
    content: Content = [{"below_nbytes": 1 << 20, "mode": "direct"}]

    assert media.thresholds({"1": content}) == "direct below 1 MiB, buffered from 1 MiB"


def test_levels_are_reported_apart_only_where_they_differ() -> None:
    """One text for all numbers of blocks at once, or one for each, in order of the number."""
    direct: Content = [{"below_nbytes": None, "mode": "direct"}]
    buffered: Content = [{"below_nbytes": None, "mode": "buffered"}]

    assert media.thresholds({"1": direct, "16": direct}) == "always direct"
    assert (
        media.thresholds({"16": direct, "4": buffered, "1": direct})
        == "always direct (one at a time); always buffered (4 at once); always direct (16 at once)"
    )


def test_too_few_rounds_are_as_many_as_for_tune() -> None:
    """The table counts a size as measured by the rule of `kvio tune`."""
    assert media.TUNE_ROUNDS == tuning.MIN_ROUNDS


@pytest.mark.parametrize("kinds", [("tmpfs", "ntfs"), ()])
def test_an_unknown_file_system_is_refused_before_anything_is_made(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    """The error lists what there is, and neither results nor directories appear."""
    with pytest.raises(kvio.ConfigError, match="known: ext4, xfs, btrfs, tmpfs, overlay, fuse"):
        media.run(_limits(tmp_path / "root", results=tmp_path / "results"), kinds=kinds)

    assert list(tmp_path.iterdir()) == []


def test_without_root_everything_is_left_out_loudly(disk: Path) -> None:
    """Who may not mount is told so for every file system, and the status says nothing was done."""
    root = disk / "root"
    root.mkdir()
    code = (
        "import email.parser, importlib.metadata, os, sys\n"  # this Python may be root's own
        f"sys.path.insert(0, {os.getcwd()!r})\n"
        "from pathlib import Path\n"
        "from benchmarks.scenarios import media\n"
        "from benchmarks.harness.run import Limits\n"
        f"root = Path({str(root)!r})\n"
        "if not os.geteuid():\n"
        "    os.chmod(root.parent, 0o755)\n"
        "    os.chown(root, 65534, 65534)\n"
        "    os.setresuid(65534, 65534, 65534)\n"
        "sys.exit(media.run(Limits(root=root)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")

    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    for kind in KINDS:
        assert f"LEFT OUT: {kind}: needs root, to mount\n" in done.stderr
    assert list(root.iterdir()) == []


@pytest.mark.root
@pytest.mark.slow
def test_tmpfs_is_looked_at_and_gone_afterwards(clean: Path) -> None:
    """The row says what memory can do; there is nothing to tune."""
    status = media.run(_limits(clean), kinds=["tmpfs"])

    assert status == 0
    row = _row(clean)
    assert row["file system"] == "tmpfs"
    assert row["durable"] == "no: tmpfs is memory: nothing on it survives a power loss"
    assert row["direct I/O"].startswith("no")
    assert (row["hybrid writes"], row["hybrid cold reads"]) == ("always buffered",) * 2
    assert row["recommended"] == "posix-tmpfile"
    recorded = _recorded(clean)
    assert recorded["table"] == [row]
    assert recorded["notes"][0].startswith("1 of 1 file systems")
    (found,) = recorded["media"]
    assert {f["name"]: f["answer"] for f in found["doctor"]["findings"]}["file system"] == "tmpfs"
    assert str(clean) not in json.dumps(recorded["media"])


@pytest.mark.root
@pytest.mark.slow
def test_a_loop_device_is_tuned_and_gone_afterwards(clean: Path) -> None:
    """The row's thresholds are those of the calibration that tune wrote, which is recorded."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4 (Debian package e2fsprogs)")
    status = media.run(_limits(clean, budget_s=40.0), kinds=["ext4"])

    assert status == 0
    row = _row(clean)
    (found,) = _recorded(clean)["media"]
    assert row["direct I/O"].startswith("yes: memory ")
    assert row["durable"] == "yes"
    assert found["calibration"]["measured"]["file_system"] == "ext4"
    assert row["hybrid writes"] == media.thresholds(found["calibration"]["write"])
    cells = found["calibration"]["measured"]["cells"]
    assert row["sizes measured"].endswith(f" of {len(cells)}")


@pytest.mark.root
@pytest.mark.slow
def test_what_cannot_be_made_is_left_out_and_the_rest_is_done(
    clean: Path, only: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """A maker that fails leaves a note with its words, and its image is removed."""
    directory = only("mount", "umount", "losetup")
    maker = directory / "mkfs.ext4"
    maker.write_text("#!/bin/sh\necho the disk is made of cheese >&2\nexit 1\n")
    maker.chmod(0o700)
    status = media.run(_limits(clean), kinds=["ext4", "tmpfs"])

    assert status == 0
    assert (
        "LEFT OUT: ext4: mkfs.ext4 ended with 1: the disk is made of cheese"
        in capfd.readouterr().err
    )
    assert _row(clean)["file system"] == "tmpfs"
    assert (
        "left out: ext4: mkfs.ext4 ended with 1: the disk is made of cheese"
        in (_recorded(clean)["notes"])
    )
    assert _recorded(clean)["notes"][0].startswith("1 of 2 file systems")


@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "program", "package"),
    [("xfs", "mkfs.xfs", "xfsprogs"), ("fuse", "bindfs", "bindfs")],
)
def test_a_missing_program_is_named_with_its_package(
    clean: Path,
    only: Callable[..., Path],
    capfd: pytest.CaptureFixture[str],
    kind: str,
    program: str,
    package: str,
) -> None:
    """Whoever reads the line knows what to install; without any row the status is 2."""
    only("mkfs.ext4", "mount", "umount", "losetup")
    status = media.run(_limits(clean), kinds=[kind])

    assert status == 2
    said = capfd.readouterr().err
    assert f"LEFT OUT: {kind}: needs {program} (Debian package {package})\n" in said


@pytest.mark.root
@pytest.mark.slow
def test_a_mount_that_fails_frees_its_loop_device(clean: Path, only: Callable[..., Path]) -> None:
    """What was made before the step that failed is undone."""
    directory = only("mkfs.ext4", "umount", "losetup")
    mount = directory / "mount"
    mount.write_text("#!/bin/sh\nexit 32\n")
    mount.chmod(0o700)

    assert media.run(_limits(clean), kinds=["ext4"]) == 2


@pytest.mark.root
@pytest.mark.slow
def test_cleaning_up_is_not_interrupted(clean: Path, only: Callable[..., Path]) -> None:
    """Ctrl-C while a file system is being unmounted changes nothing."""
    directory = only("mount")
    umount = directory / "umount"
    umount.write_text(f'#!/bin/sh\nkill -INT $PPID\nPATH={os.defpath} exec umount "$@"\n')
    umount.chmod(0o700)

    assert media.run(_limits(clean), kinds=["tmpfs"]) == 0


@pytest.mark.root
@pytest.mark.slow
def test_a_failed_tune_keeps_the_row_and_shows_in_the_status(clean: Path) -> None:
    """What kvio gets wrong is not passed off as something that the machine lacks."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4 (Debian package e2fsprogs)")
    status = media.run(_limits(clean, max_bytes=1), kinds=["ext4"])

    assert status == 1
    assert _row(clean)["sizes measured"] == "tune failed"
    assert any(
        note.startswith("FAILED: ext4: kvio tune ended with 2: ")
        for note in _recorded(clean)["notes"]
    )


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "overlay", "fuse"])
def test_interrupting_leaves_nothing_behind(clean: Path, kind: str) -> None:
    """Ctrl-C in the middle of tuning unmounts and removes everything and ends with 130."""
    if kind == "fuse" and shutil.which("bindfs") is None:
        pytest.skip("needs bindfs (Debian package bindfs)")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from benchmarks.scenarios import media\n"
        "from benchmarks.harness.run import Limits\n"
        "limits = Limits(root=Path(sys.argv[1]), results=Path(sys.argv[2]), budget_s=120)\n"
        "sys.exit(media.run(limits, kinds=['tmpfs', sys.argv[3]]))\n"
    )
    command = [sys.executable, "-c", code, str(clean), str(clean.parent / "results"), kind]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "tuning for" in line:
                break
        while not list(clean.glob(".*/*/*/*/.*tune/*")) and process.poll() is None:
            pass  # until tune writes
        assert str(clean) in Path("/proc/self/mountinfo").read_text()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()

    assert process.returncode == 130, rest
    assert _row(clean)["file system"] == "tmpfs"
    assert "INTERRUPTED by Ctrl-C: rounds are missing" in _recorded(clean)["notes"]
