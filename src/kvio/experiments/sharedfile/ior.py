"""IOR itself on the same parameters, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from kvio import StorageError, UnsupportedError
from kvio.experiments.measure import Sample
from kvio.experiments.sharedfile.order import DURABLE, Case

_PATIENCE_S: Final = 300.0
#: Open MPI would start no more ranks than there are cores, and nothing as root; others look away.
_OPEN_MPI: Final = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def find() -> tuple[str, str]:
    """Give the paths of ior and mpirun.

    Raises:
        UnsupportedError: one is not there.
    """
    found = {name: shutil.which(name) for name in ("ior", "mpirun")}
    for name, path in found.items():
        if path is None:
            raise UnsupportedError(f"{name} is not in $PATH")
    return str(found["ior"]), str(found["mpirun"])


def take(case: Case, name: str, index: int, root: Path, *, direct: bool) -> Sample:
    """Let it write and check once; its own clock counts: writes and their fsync.

    Raises:
        UnsupportedError: it is not installed, or does not run.
        StorageError: it says what cannot be understood.
    """
    ior, mpirun = find()
    command = [mpirun, "-n", str(case.writers), ior]
    command += ["-a", "POSIX", "-w", "-W", "-e", "-i", "1", "-o", str(root / "ior")]
    command += ["-b", str(case.block_bytes), "-t", str(case.transfer_bytes)]
    command += ["-s", str(case.segments), *(["--posix.odirect"] if direct else [])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            env={**os.environ, **_OPEN_MPI},
        )
    except subprocess.TimeoutExpired:
        raise StorageError(f"ior did not end for {_PATIENCE_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UnsupportedError(f"ior fails: {(last or [f'exit status {done.returncode}'])[0]}")
    wall_s = written_s(done.stdout)
    calls = case.total_bytes // case.transfer_bytes
    return Sample(
        subject=case.subject,
        block_nbytes=case.transfer_bytes,
        contender=name,
        checksum=False,
        operation=DURABLE,
        round=index,
        wall_s=wall_s,
        latencies_s=[wall_s * case.writers / calls] * calls,
        intact="incorrect data on write" not in (done.stdout + done.stderr).lower(),
        facts={"writers": case.writers, "command": command},
    )


def written_s(said: str) -> float:
    """Read the seconds of writing from IOR's table, whose columns differ between versions.

    Raises:
        StorageError: there is no such table.
    """
    headings: list[str] = []
    for line in said.splitlines():
        words = line.split()
        if words[:1] == ["access"]:
            headings = words
        elif words[:1] == ["write"] and len(words) == len(headings):
            return float(words[headings.index("wr/rd(s)")])
    raise StorageError("ior says nothing of its writes")
