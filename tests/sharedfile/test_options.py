"""Options: each does what it says, and what cannot be is refused with what to do instead."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio import SharedFile
from kvio._native import faults
from kvio.types import KiB, MiB

from . import raw
from .conftest import Create

pytestmark = pytest.mark.usefixtures("nothing_open")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mood": "good"}, "no option 'mood'; there are align, "),
        ({"mode": "fast"}, "mode must be one of hybrid, buffered, direct, not 'fast'"),
        ({"durability": "maybe"}, "durability must be one of .*, not 'maybe'"),
        ({"layout": "tree"}, "layout must be one of .*, not 'tree'"),
        ({"if_exists": "keep"}, "if_exists must be one of error, replace, not 'keep'"),
        ({"io_threads": 0}, "io_threads must be 1 or more, not 0"),
        ({"align": 0}, "align must be"),
        ({"align": -4096}, "align must be"),
        ({"align": 12288}, "power of two, not 12288"),
        ({"align": 512}, "multiple of 4096 here, not 512"),
        ({"align": 8 * MiB}, "8388608"),
        ({"align": 8 * MiB, "cell_bytes": 8 * MiB}, "8388608"),
        ({"cell_bytes": 0}, "cells of 0 bytes"),
        ({"cell_bytes": -4096}, "cells of -4096 bytes"),
        ({"cell_bytes": 5000}, "cells of 5000 bytes are no multiple of blocks of 4096"),
        ({"cell_bytes": 1 << 32}, "shorter than 4 GiB"),
        ({"stripe_bytes": 5000}, "stripes of 5000 bytes are no multiple of blocks of 4096"),
        ({"stripe_bytes": -4096}, "stripes of -4096 bytes"),
        ({"stripe_bytes": 4096, "sizes": (50_000, 50_000)}, "no stripe_bytes"),
        ({"sizes": (50_000,)}, "sizes of 1 domains"),
        ({"sizes": (50_000, 49_999)}, "99999 bytes in all"),
        ({"sizes": (100_001, -1)}, "negative"),
        ({"sizes": ()}, "sizes of 0 domains"),
        ({"rank": 2}, "ranks are 0 to 1, not 2"),
        ({"rank": -1}, "ranks are 0 to 1, not -1"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused(
    create: Create, disk_path: Path, options: dict[str, Any], says: str
) -> None:
    """A ConfigError that names the option, and nothing is made."""
    with pytest.raises(kvio.ConfigError, match=says):
        create("file", 100_000, **{"writers": 2, **options})

    assert raw.names(disk_path) == []


@pytest.mark.parametrize(
    ("size", "writers"),
    [(-1, 1), ((1 << 60) + 1, 1), (1 << 200, 1), (10, 0), (10, -1), (10, 65537), (0, 1 << 62)],
)
def test_numbers_that_cannot_be_are_refused_at_once(
    disk_path: Path, size: int, writers: int
) -> None:
    """Hostile sizes and counts cost neither time nor memory."""
    script = f"""
import resource, kvio
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    kvio.SharedFile.create({str(disk_path / "f")!r}, {size}, writers={writers})
except kvio.ConfigError as exc:
    print(exc)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert "must be" in run.stdout
    assert raw.names(disk_path) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"stripe_bytes": 4096, "cell_bytes": 4096}, {"cell_bytes": 1 << 31, "writers": 7}],
    ids=str,
)
def test_a_file_larger_than_the_disk_leaves_nothing(
    disk_path: Path, options: dict[str, Any]
) -> None:
    """What cannot be allocated is a StorageError at once, and the names are free again."""
    script = f"""
import resource, kvio
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    kvio.SharedFile.create({str(disk_path / "f")!r}, 1 << 60, durability="visible", **{options!r})
except kvio.StorageError as exc:
    print(exc)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert str(disk_path / "f") in run.stdout
    assert raw.names(disk_path) == []


def test_what_cannot_fit_is_not_even_tried(create: Create, disk_path: Path) -> None:
    """A file system that allocates until it is full would be full for everybody meanwhile."""
    room = os.statvfs(disk_path)
    too_much = room.f_blocks * room.f_frsize + 1
    with faults.inject("read", nth=1 << 30) as fault, pytest.raises(kvio.StorageFullError):
        create("file", too_much)

    assert [fault.seen[faults.sites()[site]] for site in ("open_temp", "fallocate")] == [0, 0]
    assert raw.names(disk_path) == []


@pytest.mark.parametrize("site", ["fallocate", "open_temp", "fchmod", "rename"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_creation_that_failed_leaves_nothing(
    create: Create, disk_path: Path, site: str, nth: int
) -> None:
    """Whichever step fails, no name and no descriptor is left, and it may be tried again."""
    with faults.inject(site, nth=nth, error=errno.ENOSPC) as fault:
        try:
            create("file", 100_000).abort()
        except kvio.StorageFullError:
            pass
        else:
            assert fault.seen[faults.sites()[site]] < nth
    assert raw.names(disk_path) == []
    create("file", 10).abort()


def test_alignment_is_that_of_the_file_system_or_coarser(create: Create, mode: str) -> None:
    """Domains lie on multiples of `align`, which may be chosen larger."""
    assert create("auto", MiB, mode=mode).align % 4096 == 0
    file = create("file", MiB + 5, mode=mode, align=64 * KiB, writers=3)

    assert file.align == 64 * KiB
    assert [extent.offset % (64 * KiB) for rank in range(3) for extent in file.domain(rank)] == [
        0
    ] * 3
    file.pwrite(b"x" * (MiB + 5), 0)
    file.seal()


def test_the_mode_is_one_for_all(create: Create, join: Create, mode: str) -> None:
    """Every handle reports and uses the mode that the creator chose."""
    file = create("file", MiB, writers=2, mode=mode)

    assert file.mode == join("file", 1).mode == mode


def test_hybrid_chooses_and_says_why(create: Create, real_disk: Path) -> None:
    """A small file is written through the page cache, a large one of many writers past it."""
    small = create("small", 10_000, writers=2, durability="durable")
    large = create("large", 64 * MiB, writers=4, durability="durable")

    assert real_disk
    assert (small.mode, large.mode) == ("buffered", "direct")
    large.abort()
    small.pwrite(bytes(10_000), 0)
    assert "5000 bytes" in small.seal().reason


def test_options_are_values() -> None:
    """Options are frozen, compare by value and refuse positions."""
    assert kvio.SharedFileOptions() == kvio.SharedFileOptions(align="auto")
    with pytest.raises(AttributeError):
        kvio.SharedFileOptions().align = 1  # type: ignore[misc]


def test_memory_is_not_durable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where nothing survives a power loss, a durable file is refused with what to ask for."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    path = shm / f"kvio-test-{tmp_path_factory.getbasetemp().name}"
    with pytest.raises(kvio.ConfigError, match="durability='visible' promises less"):
        SharedFile.create(path, 100)
    with pytest.raises(kvio.ConfigError, match="no direct I/O"):
        SharedFile.create(path, 100, durability="visible", mode="direct")

    assert not list(shm.glob(f"*{path.name}*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"verify": "bogus"}, "verify must be"), ({"rank": 0, "io_threads": 0}, "io_threads must")],
)
def test_opening_checks_its_options(
    create: Create, join: Create, options: dict[str, Any], says: str
) -> None:
    """`open` refuses what it cannot do, also where it would need it later."""
    create("file", 100)
    with pytest.raises(kvio.ConfigError, match=says):
        join("file", **options)


def test_recovering_checks_its_options(create: Create, disk_path: Path) -> None:
    """`recover` refuses a handle without threads and takes nothing over."""
    create("file", 100).close()
    with pytest.raises(kvio.ConfigError, match="io_threads"):
        SharedFile.recover(disk_path / "file", io_threads=0)
    SharedFile.recover(disk_path / "file").abort()
