"""Clients of a daemon that were not closed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvio.staging.daemon.server import StageDaemon
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import LONG_S, ControlledBackend
from tests.staging.daemon.daemons import client_of, socket_path, until
from tests.staging.engines import remote

PROGRAM = """
import sys
import kvio
from tests.staging.daemon.daemons import Process
from tests.staging.engines import remote

url, path, paused = sys.argv[1:]
daemon = Process(url, path, "--capacity", "1MiB")
tier = kvio.stage(kvio.open_store(url), daemon=path)
if paused == "paused":
    tier.pause()
tier.write_block("k", b"data")
if paused != "paused":
    tier.barrier()
daemon.kill()
remote(tier).listening.join()
"""


def test_a_dropped_client_ends_when_its_writes_are_stored(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon
) -> None:
    """Its threads do not keep it, and end; the daemon has every write."""
    tier = client_of(store, daemon)
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    listening = remote(tier).listening
    with pytest.warns(ResourceWarning, match="staging tier of memory:// was dropped"):
        del tier
    assert listening.is_alive()
    store.wrapper.let_go()

    assert receipt.wait(timeout=LONG_S)
    listening.join(LONG_S)
    until(lambda: "kvio-dropped" not in [thread.name for thread in threading.enumerate()])
    assert not listening.is_alive()
    assert store.contains("k")


@pytest.mark.slow
@pytest.mark.parametrize("paused", ["paused", "drained"])
def test_a_program_says_at_its_end_what_a_killed_daemon_took_along(
    disk_path: Path, paused: str
) -> None:
    """Writes whose failure was not reported; and nothing where all were stored."""
    with socket_path() as path:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"hybrid://{disk_path}/s?create=true", path, paused],
            capture_output=True, text=True, timeout=LONG_S, cwd=Path(__file__).parents[3],
        )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    said = f"kvio: 1 writes of the drain daemon at {path} were not done" in ended.stderr
    assert said == (paused == "paused")
