"""The nearest fio job to storing blocks, and what differs.

A file a block, filled by one write of the block's size, with O_DIRECT: ``filesize == bs``, files
made when they are opened and closed when they are full. fio opens a final name with O_CREAT where
kvio opens O_TMPFILE and links, keeps all files in one directory where kvio has 256, and stores no
trailer (kvio's payload is followed by 4096 bytes more under direct I/O). It reports its own run
time in whole milliseconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final, Literal, TypeAlias

Verb: TypeAlias = Literal["write", "read"]

_COMMON: Final = (
    "--direct=1", "--ioengine=psync", "--thread", "--group_reporting", "--openfiles=1",
    "--file_service_type=sequential", "--fallocate=none", "--scramble_buffers=0",
    "--invalidate=0", "--output-format=json",
)  # fmt: skip


def is_there() -> bool:
    """Tell whether fio is installed."""
    return shutil.which("fio") is not None


def run(directory: Path, name: str, verb: Verb, *, size: int, count: int, depth: int) -> float:
    """Write or read *count* files of *size* bytes by *depth* threads; the seconds it took."""
    command = (
        "fio", f"--name={name}", f"--directory={directory}", f"--rw={verb}", f"--bs={size}",
        f"--filesize={size}", f"--nrfiles={count // depth}", f"--numjobs={depth}",
        f"--create_on_open={int(verb == 'write')}", *_COMMON,
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][verb]
    if figures["total_ios"] != count:
        raise RuntimeError(f"fio did {figures['total_ios']} transfers instead of {count}")
    return float(figures["io_bytes"] / figures["bw_bytes"])


def retire(directory: Path, name: str) -> None:
    """Empty the files of a job."""
    for path in directory.glob(f"{name}.*"):
        os.truncate(path, 0)
