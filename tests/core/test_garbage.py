"""What a failed call leaves behind can be collected, whatever it hangs together with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import errno, gc, sys
import kvio
from kvio._native import faults

with kvio.open_store(sys.argv[1], root=sys.argv[2]) as store:
    for _ in range(100):
        with faults.inject("write", error=errno.EIO, times=99):
            try:
                store.write_block("key", memoryview(bytearray(4096)))
            except kvio.StorageError as exc:
                exc.itself = exc  # as frameworks do that keep errors and their tracebacks
        gc.collect()
"""


def test_a_failed_write_in_a_reference_cycle_is_collected(tmp_path: Path) -> None:
    """No crash, and no complaint of the collector.

    CPython before 3.13 crashes when a memoryview and a cffi object made from it are garbage in
    one cycle; an error's traceback holds the frames of the write, and these its buffers.
    """
    command = [sys.executable, "-c", _SCRIPT, "posix-tmpfile", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (run.returncode, run.stderr) == (0, "")
