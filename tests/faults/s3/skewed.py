"""A server whose clock goes wrong: to it, every client's does.

It is the project's own in memory, which refuses what was signed 15 minutes before or after; its
clock goes 20 minutes fast while a file lies there.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.s3 import servers
from tests.s3.servers import Endpoint

_PROGRAM: Final = """
import os, sys, time
right, marker = time.time, sys.argv.pop(1)
time.time = lambda: right() + 1200 * os.path.exists(marker)
from benchmarks.s3mem import server
sys.exit(server.main(sys.argv[1:]))
"""


class Clock:
    """The server's clock: right, or 20 minutes fast."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    @contextmanager
    def wrong(self) -> Iterator[None]:
        """Let it go wrong meanwhile."""
        self._marker.touch()
        try:
            yield
        finally:
            self._marker.unlink()


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        servers.stop(process)


@contextmanager
def serving() -> Iterator[tuple[Endpoint, Clock]]:
    """Run the server on a free loopback port; it ends with this process."""
    access, secret = "kvio" + secrets.token_hex(8), secrets.token_hex(20)
    with tempfile.TemporaryDirectory(prefix="kvio-skewed-") as scratch:
        marker = Path(scratch) / "wrong"
        options = ["--until-stdin-closes", "--access", access, "--secret", secret]
        with (
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(marker), *options],
                cwd=Path(__file__).parents[3],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as process,
            _ended(process),
        ):
            assert process.stdout is not None
            url = process.stdout.readline().decode().strip()
            assert url, "the server did not start"
            endpoint = Endpoint(
                url=url,
                access_key=access,
                secret_key=secret,
                region=servers.REGION,
                name="s3mem",
                is_mock=False,
                ca_file=None,
            )
            yield endpoint, Clock(marker)
