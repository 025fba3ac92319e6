"""``kvio stage-daemon``: ready when it says so, and it does not end before all is stored."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.testing import payloads
from tests.staging.controlled import LONG_S
from tests.staging.daemon.daemons import Process, socket_path

pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
pytest.importorskip("rich", reason="the extra cli is not installed: no rich")
pytestmark = pytest.mark.slow


@pytest.fixture
def path() -> Iterator[str]:
    """Where daemons listen."""
    with socket_path() as path:
        yield path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store's directory."""
    root = tmp_path / "store"
    root.mkdir()
    return root


def test_it_says_when_it_is_ready_and_for_what(root: Path, path: str) -> None:
    """In one line: store, socket, memory. Once it is read a client may connect."""
    with Process(str(root), path, "--capacity", "2MiB") as daemon:
        assert daemon.ready == f"staging hybrid://{root} at {path}: 2 MiB\n"
        with kvio.open_store(f"hybrid://{root}") as store, kvio.stage(store, daemon=path) as tier:
            assert tier.write_block("k", b"data").wait(timeout=LONG_S).level == "visible"
            assert tier.stats().capacity_bytes == 2 << 20
        assert daemon.end() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_has_it_store_everything_first(
    root: Path, path: str, number: signal.Signals
) -> None:
    """Paused or not; the receipts of its clients end well."""
    blocks = {f"k{n}": payloads.payload(300_000, n) for n in range(20)}
    with Process(str(root), path, "--capacity", "8MiB") as daemon:
        store = kvio.open_store(f"hybrid://{root}")
        tier = kvio.stage(store, daemon=path)
        tier.pause()
        receipts = [tier.write_block(key, data) for key, data in blocks.items()]
        before = list(store.list_keys())
        daemon.process.send_signal(number)
        _, said = daemon.process.communicate(timeout=LONG_S)
        levels = {receipt.wait(timeout=LONG_S).level for receipt in receipts}
        tier.close()

    assert before == []
    assert (daemon.process.returncode, said) == (0, "")
    assert levels == {kvio.Level.VISIBLE}
    assert {key: bytes(store.read_block(key)) for key in store.list_keys()} == blocks
    store.close()


def test_what_it_cannot_store_it_names(root: Path, path: str) -> None:
    """In one line, with the status of a failure."""
    store = kvio.open_store(f"hybrid://{root}")
    with store, Process(str(root), path, "--retries", "0") as daemon:
        tier = kvio.stage(store, daemon=path)
        tier.pause()
        receipt = tier.write_block("the/key", b"data")
        shutil.rmtree(root)
        status, said = daemon.end()

    assert status == 2
    assert len(said.splitlines()) == 1
    assert said.startswith("kvio: 1 staged block(s) are not stored")
    assert "'the/key'" in said
    with pytest.raises(kvio.StorageError):
        receipt.wait(timeout=LONG_S)
    with pytest.raises(kvio.StorageError):
        tier.close()


def test_ending_may_be_given_a_limit(root: Path, path: str) -> None:
    """What is late is named."""
    limits = ("--drain-timeout", "0.05s", "--retries", "1000")
    store = kvio.open_store(f"hybrid://{root}")
    with store, Process(str(root), path, *limits) as daemon:
        tier = kvio.stage(store, daemon=path)
        tier.pause()
        tier.write_block("k", b"data")
        shutil.rmtree(root)
        status, said = daemon.end()
    with pytest.raises(kvio.StorageError):
        tier.close()

    assert (status, "timed out" in said, "'k'" in said) == (2, True, True)


def test_a_second_signal_ends_it_at_once(root: Path, path: str) -> None:
    """For whoever cannot wait; what is staged is lost, and the client hears so."""
    store = kvio.open_store(f"hybrid://{root}")
    with store, Process(str(root), path, "--retries", "1000") as daemon:
        tier = kvio.stage(store, daemon=path)
        tier.pause()
        receipt = tier.write_block("k", b"data")
        shutil.rmtree(root)
        daemon.process.send_signal(signal.SIGTERM)
        while os.path.exists(path) and not tier.stats().retries:
            pass
        status, said = daemon.end()
        with pytest.raises(kvio.TierNotDrainedError, match="'k'"):
            receipt.wait(timeout=LONG_S)
    with pytest.raises(kvio.TierNotDrainedError):
        tier.close()

    assert (status, said) == (143, "")


def test_what_cannot_be_is_reported_in_one_line(root: Path, path: str) -> None:
    """A directory that others can enter."""
    os.chmod(os.path.dirname(path), 0o755)
    with Process(str(root), path) as daemon:
        _, said = daemon.process.communicate(timeout=LONG_S)

    assert daemon.ready == ""
    assert daemon.process.returncode == 2
    assert said.startswith("kvio: the socket's directory")
    assert len(said.splitlines()) == 1
