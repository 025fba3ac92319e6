"""What kvio makes is its user's alone, and what others made in its place does not hold it up."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import pytest

import kvio
from tests.faults.totals import Tally
from tests.posix import faultlab
from tests.staging.controlled import LONG_S
from tests.staging.daemon.daemons import serving

MASKS: Final = (0o000, 0o022, 0o277, 0o777)
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
#: A call that hangs is ended by this, and fails its test.
HANGS_S: Final = 120
#: What may stand where a file of ours should.
KINDS: Final = ("directory", "unreadable", "loop", "sparse", "device", "fifo")


@contextmanager
def watched(folder: Path, mask: int) -> Iterator[None]:
    """Set the umask, and see at the end that nobody else may do anything with what is there."""
    with faultlab.umask(mask):
        yield
    look(folder)


def look(folder: Path) -> None:
    """Check that everything below a folder is for its owner alone."""
    for path in folder.rglob("*"):
        info = path.lstat()
        assert not stat.S_IMODE(info.st_mode) & OTHERS, f"{path.name}: {info.st_mode:o}"
        assert info.st_mode & stat.S_IRUSR, f"{path.name}: {info.st_mode:o}"
        assert not stat.S_ISDIR(info.st_mode) or stat.S_IMODE(info.st_mode) == 0o700


def look_at_descriptors(before: set[int]) -> None:
    """See the same of files without a name that are open now: temporary ones, spools."""
    for fd, target in faultlab.open_descriptors().items():
        if fd in before or not target.startswith("/") or target.startswith("/dev/"):
            continue
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode) and not target.startswith("/memfd:"):
            assert not stat.S_IMODE(mode) & OTHERS, f"{target}: {mode:o}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("publish", ["auto", "rename"])
def test_a_store_is_its_users_alone(
    mask: int, layout: Literal["block", "plain"], publish: str, tmp_path: Path
) -> None:
    """Root, directories, blocks and those replaced: 0700 and 0600."""
    folder = tmp_path / "all"
    folder.mkdir(mode=0o700)
    with (
        watched(folder, mask),
        kvio.open_store(
            "posix-tmpfile",
            root=folder / "root",
            layout=layout,
            options={"create": True, "publish": publish},
        ) as store,
    ):
        store.write_blocks((f"a{i}/b", b"data") for i in range(20))
        store.write_block("a0/b", b"more", if_exists="replace")
        store.write_block("large", bytes(3 << 20))
    assert stat.S_IMODE((folder / "root").stat().st_mode) == 0o700


@pytest.mark.parametrize("mask", MASKS)
def test_a_shared_file_is_its_users_alone(mask: int, tmp_path: Path) -> None:
    """While it is written, and when its writer has died: nobody else's. Sealed it may be read."""
    folder = tmp_path / "all"
    folder.mkdir(mode=0o700)
    options: dict[str, Any] = {
        "writers": 2,
        "durability": "visible",
        "layout": "plain",
        "sidecar": True,
    }
    with watched(folder, mask):
        for file_mode in (0o400, None):
            path = folder / f"file{file_mode}"
            with kvio.SharedFile.create(path, 10_000, file_mode=file_mode, **options) as file:
                file.pwrite(bytes(10_000), 0)
                look(folder)
                if file_mode:
                    file.seal()
    with faultlab.umask(mask), kvio.SharedFile.create(folder / "read", 1, **options) as file:
        file.pwrite(b"x", 0)
        file.seal()
    sealed = [path for path in folder.iterdir() if "read" in path.name]
    assert len(sealed) == 2
    for path in sealed:
        assert stat.S_IMODE(path.stat().st_mode) == 0o400 | 0o444 & ~mask


@pytest.mark.parametrize("mask", MASKS)
def test_a_daemon_is_its_users_alone(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket, its directory, its lock and what clients spill."""
    folder = tmp_path / "all"
    folder.mkdir(mode=0o700)
    spool = folder / "spool"
    spool.mkdir(mode=0o700)
    monkeypatch.chdir(folder)  # the path of a socket may have 107 bytes
    before = set(faultlab.open_descriptors())
    options = {"create": True}
    with (
        watched(folder, mask),
        kvio.open_store("posix-tmpfile", root=folder / "root", options=options) as store,
        serving(store, "1MiB", path="socket") as daemon,
        kvio.stage(store, daemon=daemon.path, spool=str(spool)) as tier,
    ):
        tier.write_block("k", b"data")
        tier.barrier(timeout=LONG_S)
        look(folder)
        look_at_descriptors(before)


@pytest.mark.timeout(HANGS_S)
@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_a_blocks_place_holds_nobody_up(
    kind: str, layout: Literal["block", "plain"], tmp_path: Path, tally: Tally
) -> None:
    """A pipe, a device, a file of a tebibyte, a loop of links: every verb ends, or is refused."""
    root = tmp_path / "root"
    with kvio.open_store(
        "posix-tmpfile", root=root, layout=layout, options={"create": True}
    ) as store:
        store.write_block("k", b"data")
        path = faultlab.file_of(root, "k", layout=layout)
        place(path, kind)
        for verb in (
            lambda: store.read_block_into("k", bytearray(100)),
            lambda: store.read_block("k", offset=0, nbytes=4),
            lambda: store.stat_block("k"),
            lambda: store.contains("k"),
            lambda: store.read_blocks_into([("k", bytearray(100))]),
            lambda: list(store.list_keys()),
            lambda: store.sweep(older_than_s=0.0),
            lambda: store.write_block("k", b"data"),
            lambda: store.delete_block("k"),
        ):
            tally.add(names=1)
            try:
                verb()
            except kvio.KvioError:
                continue


def place(path: Path, kind: str) -> None:
    """Put something under a name instead of a block."""
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path, 0o600)
        case "device":
            if os.geteuid():
                path.symlink_to("/dev/zero")
            else:
                try:
                    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
                except PermissionError:
                    path.symlink_to("/dev/zero")
        case "sparse":
            path.touch(0o600)
            try:
                os.truncate(path, 1 << 40)
            except OSError as exc:
                pytest.skip(f"no file of a tebibyte here: {exc.strerror}")
        case "directory":
            path.mkdir(mode=0o700)
        case "loop":
            path.symlink_to(path.name)
        case "unreadable":
            path.touch(0o000)


@pytest.mark.timeout(HANGS_S + 60)
@pytest.mark.parametrize("name", [".f.kvio-map", ".f.kvio-data", "f", ".kvio-calibration.json"])
def test_what_stands_in_place_of_kvios_own_files_holds_nobody_up(
    name: str, tmp_path: Path, tally: Tally
) -> None:
    """Under the names of a shared file's parts, or of a calibration: all ends, or is refused."""
    roots = [tmp_path / kind for kind in KINDS]
    for root in roots:
        root.mkdir(mode=0o700)
        if name == ".f.kvio-data":  # what it belongs to stands
            with kvio.SharedFile.create(root / "f", 8192, durability="visible") as file:
                file.pwrite(bytes(4096), 0)
        else:
            (root / name).touch()
        place(root / name, root.name)
    # A process of its own: one that hangs, or reads without end, would take the others with it.
    with subprocess.Popen(
        [sys.executable, "-c", _CALLS, *map(str, roots)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said, wrong = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, wrong = process.communicate()
    tally.add(names=5 * len(roots))
    assert said.split() == list(KINDS), f"after {said.split()}: {wrong[-2000:]}"
    assert process.returncode == 0


#: Names each root when all calls have ended there.
_CALLS: Final = """
import os, resource, sys, kvio
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
for root in sys.argv[1:]:
    for call in (
        lambda: kvio.SharedFile.open(root + "/f").close(),
        lambda: kvio.SharedFile.open(root + "/f", 0).close(),
        lambda: kvio.SharedFile.recover(root + "/f").close(),
        lambda: kvio.SharedFile.create(root + "/f", 8192, durability="visible").abort(),
        lambda: kvio.open_store("hybrid", root=root).close(),
    ):
        try:
            call()
        except kvio.KvioError:
            pass
    print(os.path.basename(root), flush=True)
"""
