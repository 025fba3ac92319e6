"""Run the installed command, and inspect a store without kvio."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvio.backends.posix.directories import temp_prefix

SCRIPT = Path(sysconfig.get_path("scripts"), "kvio")


def run(
    *arguments: object, stdin: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run kvio to its end."""
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        env={**os.environ, "COLUMNS": "80", **environment},
        timeout=120,
        check=False,
    )


def complaint(done: subprocess.CompletedProcess[bytes], status: int) -> str:
    """Return the single error line of a failed command."""
    lines = done.stderr.decode().splitlines()

    assert done.returncode == status, done
    assert len(lines) == 1, lines
    assert lines[0].startswith("kvio: "), lines
    return lines[0]


def file_of(store: Path, key: str) -> Path:
    """Return the path of a block's file, found without kvio."""
    (path,) = store.glob(f"?/?/{key.replace('/', '~')}")
    return path


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def kvio_crc32c(data: bytes) -> int:
    """Return the checksum computed by google-crc32c."""
    google_crc32c = pytest.importorskip("google_crc32c", reason="google-crc32c is not installed")
    return int(google_crc32c.value(data))


def temporary_prefix(pid: int) -> str:
    """Return the prefix of a temporary file of a writer on this machine and boot."""
    mine = temp_prefix()
    return mine.replace(f"-{os.getpid()}-", f"-{pid}-")


def load_json(text: bytes) -> Any:
    return json.loads(text)


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Yield the two ends of a terminal; the caller closes the second."""
    master, slave = pty.openpty()
    try:
        yield master, slave
    finally:
        os.close(master)


def read_to_end(master: int) -> bytes:
    """Read a terminal until its other end is closed."""
    shown = b""
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:  # EIO: the other end is closed
            return shown


def run_on_terminal(*arguments: object) -> tuple[bytes, bytes]:
    """Run kvio with a terminal as stderr; return the output to the terminal and to stdout."""
    with terminal() as (master, slave):
        process = subprocess.Popen(
            [SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, stderr=slave
        )
        os.close(slave)
        shown = read_to_end(master)
        stdout, _ = process.communicate(timeout=60)
    return shown, stdout
