"""Settings of a run, names of blocks, and counts that outlive processes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

import kvio
from kvio.connectors.dlio import counts
from kvio.connectors.dlio.settings import VARIABLE, Settings, configured, key_of, path_of, store_url


@pytest.mark.parametrize(
    "settings",
    [
        Settings(data="posix-direct:///mnt/data"),
        Settings(
            data="s3+boto3://bucket/a",
            checkpoint="hybrid:///nvme?durability=durable",
            options={"part_size": 8388608},
            staging_dir="/mnt",
            decode=False,
        ),
    ],
)
def test_settings_survive_the_environment(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of a rank read its settings."""
    monkeypatch.setenv(VARIABLE, settings.to_text())

    assert configured() == settings


def test_a_url_alone_is_enough() -> None:
    """KVIO_DLIO may be a store's URL."""
    assert Settings.from_text(" posix-direct:///a ") == Settings(data="posix-direct:///a")


def test_without_the_variable_nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done that was not asked for."""
    monkeypatch.delenv(VARIABLE, raising=False)

    assert configured() is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "neither a URL nor JSON"),
        ('{"checkpoint": "memory://"}', "'data'"),
        ('{"data": "memory://", "rot": 1}', "unknown settings rot; known: data"),
        ('{"data": 3}', "'data' must be text"),
        ('{"data": "memory://", "decode": "yes"}', "true or false"),
        ('{"data": "memory://", "options": 3}', "mapping"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, said: str) -> None:
    """Each with a sentence that names the setting."""
    with pytest.raises(kvio.ConfigError, match=said):
        Settings.from_text(text)


def test_a_store_is_named_by_backend_and_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are made absolute and quoted; buckets are taken as they are."""
    monkeypatch.chdir("/")

    assert store_url("posix-direct", "mnt/a b?c") == "posix-direct:///mnt/a%20b%3Fc"
    assert store_url("s3+boto3", "bucket/prefix") == "s3+boto3://bucket/prefix"
    with pytest.raises(kvio.ConfigError, match=r"not a URL"):
        store_url("hybrid", "hybrid:///mnt")


@pytest.mark.parametrize("name", ["data/a.npz", "./data/a.npz", "/data//a.npz", "data/./a.npz"])
def test_a_path_is_one_key_however_it_is_written(name: str) -> None:
    """And a path that DLIO makes absolute stays the same."""
    assert key_of(name) == "data/a.npz"
    assert os.path.abspath(path_of(name)) == path_of(name) == "/data/a.npz"


@pytest.mark.parametrize("name", ["../a", "a/../b", "a b/c", "", "/", ".hidden/a"])
def test_a_path_that_is_no_key_is_refused(name: str) -> None:
    """Nothing is mapped many to one."""
    with pytest.raises(kvio.InvalidKeyError):
        key_of(name)


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count into a directory of the test."""
    monkeypatch.setenv(counts.VARIABLE, str(tmp_path))
    monkeypatch.setattr(counts, "_counters", None)


@pytest.mark.usefixtures("counting")
def test_counts_of_a_worker_that_was_killed_are_kept() -> None:
    """A forked worker counts into its rank's counts, and SIGKILL takes none of them away."""
    counts.add("reads", 5, begun_ns=time.time_ns())
    if (pid := os.fork()) == 0:
        counts.add("reads", 7, begun_ns=time.time_ns())
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)

    assert counts.total() == counts.Counts(reads=counts.Moved(2, 12))


@pytest.mark.usefixtures("counting")
def test_nothing_counted_is_nothing() -> None:
    """An empty directory sums to zero."""
    assert counts.total() == counts.Counts()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """And what a living one has is left alone, as is what others named."""
    if (pid := os.fork()) == 0:
        counts.make("staging", parent=str(tmp_path))
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    other = tmp_path / "kvio-dlio-staging-of-mine"
    other.mkdir()
    [left] = tmp_path.glob(f"kvio-dlio-staging-{pid}-*")
    first = counts.make("staging", parent=str(tmp_path))
    second = counts.make("staging", parent=str(tmp_path))

    assert not left.exists()
    assert {str(path) for path in tmp_path.iterdir()} == {first, second, str(other)}


@pytest.mark.usefixtures("counting")
def test_a_window_is_from_the_first_start_to_the_last_end() -> None:
    """Of several processes too: the window of a phase begins with the earliest and ends last."""
    begun = time.time_ns()
    counts.add("reads", 5, begun_ns=begun + 10)
    if (pid := os.fork()) == 0:
        counts.add("reads", 7, begun_ns=begun)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    counts.add("reads", 1, begun_ns=begun + 20)

    window = counts.total().reads.window_ns
    assert window is not None
    assert window[0] == begun
    assert begun < window[1] <= time.time_ns()
    assert counts.total().reads.seconds == (window[1] - window[0]) / 1e9
    assert counts.total().writes == counts.Moved()
    assert counts.total().writes.seconds == 0


def test_files_are_staged_in_memory_unless_a_directory_is_named() -> None:
    """Where there is memory that is a directory; else where temporary files are."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()

    assert Settings(data="posix-direct:///mnt").staging_parent() == memory
    assert Settings(data="posix-direct:///mnt", staging_dir="/mnt").staging_parent() == "/mnt"
