"""What all tests share: where a disk is, what lies there, and how hard Hypothesis tries."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from kvio.filesystem.descriptors import SHARED

from .faults.reporting import pytest_terminal_summary as pytest_terminal_summary
from .media import IN_MEMORY, filesystem_of
from .posix import mounts
from .skips import pytest_sessionfinish as pytest_sessionfinish

#: A third party's distribution with tests of its own; tests/test_registry.py installs it.
collect_ignore = ["plugin_dist"]

#: Hypothesis: `nox -s property` asks for the long games.
hypothesis.settings.register_profile("quick", max_examples=60, deadline=None)
hypothesis.settings.register_profile(
    "long",
    max_examples=300,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the directory for tests that need a disk."""
    parser.addoption(
        "--kvio-test-dir",
        default=os.environ.get("KVIO_TEST_DIR"),
        help="directory on a disk's file system for tests of durability and direct I/O "
        "(default: $KVIO_TEST_DIR, else the system's temporary directory)",
    )


_SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
#: Standard error as it was before pytest captured it.
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep standard error for `pytest_timeout_set_timer`; nothing is captured at this point."""
    assert sys.__stderr__ is not None
    config.stash[_STDERR] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close what `pytest_configure` opened."""
    os.close(config.stash[_STDERR])


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark `root` what needs a journal where the disk has none: root alone can mount one."""
    if mounts.has_journal(parent_of(config)):
        return
    for item in items:
        names = getattr(item, "fixturenames", ())
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        variant = parameters.get("variant") if "directories" in names else None
        if "journaled_disk" in names or (variant and variant.needs_journal):
            item.add_marker("root")


def parent_of(config: pytest.Config) -> Path:
    """Return the directory under which stores on disk are made."""
    return Path(config.getoption("--kvio-test-dir") or tempfile.gettempdir()).resolve()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Print the traceback of all threads at nine tenths of the test's timeout.

    Python's signal handler, which ends the test, never runs if the main thread is stuck in C. The
    time is derived here, from the option, the setting or the test's own mark, whichever holds:
    pytest's ``faulthandler_timeout`` would be a second number that may disagree.

    Not under ASan: a thread is started for it, and a test that forks while that thread holds a
    lock of the allocator has a child that waits for the lock for ever.
    """
    if not _SANITIZED:
        stderr = item.config.stash[_STDERR]
        faulthandler.dump_traceback_later(0.9 * settings.timeout, file=stderr)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer() -> Generator[None, object, object]:
    """Print nothing for a test that has ended."""
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.fixture(scope="session")
def disk_parent(request: pytest.FixtureRequest) -> Path:
    """Return the directory under which stores on disk are made."""
    return parent_of(request.config)


@pytest.fixture(scope="session")
def disk_filesystem(disk_parent: Path) -> str:
    """Name the file system of `disk_parent`."""
    return filesystem_of(disk_parent)


@pytest.fixture
def disk_path(disk_parent: Path) -> Iterator[Path]:
    """Yield a fresh directory where a disk should be, gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="kvio-test-", dir=disk_parent))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def real_disk(disk_path: Path, disk_filesystem: str) -> Path:
    """Return a fresh directory on a disk's file system; skip where it is in memory."""
    if disk_filesystem in IN_MEMORY:
        pytest.skip(f"{disk_path.parent} is {disk_filesystem}, not a disk: set KVIO_TEST_DIR")
    return disk_path


@pytest.fixture(autouse=True)
def _descriptors_are_plenty() -> None:
    """Forget that an earlier test let the process run out of descriptors, if only by a fault."""
    SHARED._most = 1 << 20


@pytest.fixture
def journaled_disk(real_disk: Path) -> Iterator[Path]:
    """Return a fresh directory where a file synced without a name keeps its bytes.

    That is xfs, or ext4 with a journal; root mounts one where the disk is neither.
    """
    with mounts.journaled(real_disk) as path:
        yield path


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let child processes heed SIGINT, which a background job of a shell has ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
