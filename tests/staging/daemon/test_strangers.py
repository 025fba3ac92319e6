"""Only our own user is served: the kernel says who connects, and nobody is excepted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.options import TierOptions
from tests.staging.daemon.daemons import socket_path

STRANGER = 54321

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user"),
]

#: Connects without our code, as a stranger would, and prints what it hears.
_STRANGE_CLIENT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
data, fds, _, _ = socket.recv_fds(sock, 65536, 8)
print(len(fds), data[8:].decode('latin-1'))
print(len(sock.recv(65536)))
"""

#: Listens where clients look for a daemon, as another user.
_STRANGE_DAEMON = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sock.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o666); sock.listen()
print('ready', flush=True)
client, _ = sock.accept()
print(len(client.recv(65536)), flush=True)
"""


def run(code: str, path: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, path, str(STRANGER)], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvio.Store]:
    with kvio.open_store(f"posix-tmpfile://{tmp_path}/store?create=true") as store:
        yield store


def open_to_all(path: str) -> None:
    """Take the first fence away, to see the second."""
    os.chmod(os.path.dirname(path), 0o777)
    os.chmod(path, 0o666)


def test_a_stranger_is_refused_and_gets_no_memory(store: kvio.Store) -> None:
    """Even where the socket's permissions let it connect."""
    logged: list[str] = []
    with (
        socket_path() as path,
        StageDaemon(
            store,
            path,
            capacity_bytes=1 << 20,
            options=TierOptions(drain_threads=1),
            log=logged.append,
        ),
    ):
        open_to_all(path)
        stranger = run(_STRANGE_CLIENT, path)
        heard, _ = stranger.communicate(timeout=60)

    lines = heard.splitlines()
    assert lines[0].startswith("0 ")
    assert f"does not serve uid {STRANGER}" in lines[0]
    assert lines[1] == "0"
    assert len(logged) == 1
    assert str(STRANGER) in logged[0]


def test_the_directory_keeps_a_stranger_out(store: kvio.Store) -> None:
    """As it is, it cannot even connect."""
    with (
        socket_path() as path,
        StageDaemon(store, path, capacity_bytes=1 << 20, options=TierOptions(drain_threads=1)),
    ):
        stranger = run(_STRANGE_CLIENT.replace("sock.connect(sys.argv[1])", _TRY), path)
        heard, _ = stranger.communicate(timeout=60)

    assert heard == "PermissionError\n"


_TRY = """
try:
    sock.connect(sys.argv[1])
except OSError as exc:
    sys.exit(print(type(exc).__name__))
"""


def test_a_client_does_not_trust_another_users_daemon(store: kvio.Store) -> None:
    """Root neither: whoever sits on the path gets no byte."""
    with socket_path() as path:
        os.chmod(os.path.dirname(path), 0o777)
        daemon = run(_STRANGE_DAEMON, path)
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        with pytest.raises(kvio.AccessDeniedError, match=f"uid {STRANGER}"):
            kvio.stage(store, daemon=path)
        heard, _ = daemon.communicate(timeout=60)

    assert heard == "0\n"


def test_root_is_a_stranger_to_a_users_daemon() -> None:
    """Its rights over files do not count here."""
    with socket_path() as path:
        os.chown(os.path.dirname(path), STRANGER, STRANGER)
        with subprocess.Popen(
            [sys.executable, "-c", _USERS_DAEMON, path, str(STRANGER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as daemon:
            assert daemon.stdout is not None
            assert daemon.stdin is not None
            assert daemon.stdout.readline() == "ready\n"
            daemon.stdin.write("\n")
            daemon.stdin.flush()
            assert daemon.stdout.readline() == "ready\n"
            heard, _ = run(_ROOTS_CLIENT, path).communicate(timeout=60)
            daemon.communicate("\n", timeout=60)

    assert heard.startswith("0 ")
    assert "does not serve uid 0" in heard


_ROOTS_CLIENT = "\n".join(
    line for line in _STRANGE_CLIENT.splitlines() if not line.startswith("os.setgroups")
)

#: Everything is imported before it gives root up: a user may not read where kvio is installed.
_USERS_DAEMON = """
import os, sys, tempfile
import kvio
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.options import TierOptions

def serve(path):
    options = TierOptions(drain_threads=1)
    with tempfile.TemporaryDirectory() as root, kvio.open_store('posix-tmpfile', root=root) as s:
        with StageDaemon(s, path, capacity_bytes=1 << 20, options=options):
            print('ready', flush=True)
            input()

with tempfile.TemporaryDirectory() as own:
    serve(own + '/s')
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
serve(sys.argv[1])
"""
