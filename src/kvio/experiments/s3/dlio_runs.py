"""Runs of the unmodified DLIO that only generate: on its own storage, and through a library."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from kvio import MiB, UnsupportedError
from kvio.experiments.dlio.options import of_phase, quoted
from kvio.experiments.dlio.process import DlioRun, run_dlio
from kvio.experiments.s3.dlio_plan import Load
from kvio.experiments.s3.options import as_by_hand, signing
from kvio.experiments.s3.server import Server

_FOLDER: Final = "data"
_CLASSES: Final = "kvio.connectors.dlio"
#: Stock DLIO begins without torch if it need not read by it nor save by it, and it does neither.
_STOCK: Final = (
    f"++workload.reader.data_loader_classname={_CLASSES}.loader.KvioLoader",
    "++workload.reader.data_loader_sampler=iterative",
    "++workload.checkpoint.checkpoint_mechanism_classname="
    f"{_CLASSES}.checkpoints.NumpyCheckpointing",
)
_THROUGH_KVIO: Final = ("++workload.storage.storage_type=parallel_fs",)
_TIMEOUT_S: Final = 120.0
_PART_BYTES: Final = 8 * MiB
_CONNECTIONS: Final = 64
#: An error's own line at the end of a traceback, or what kvio says when it refuses.
_COMPLAINT: Final = re.compile(r"^(?:\[KVIO\] (?!rank \d+ failed).*|[\w.]+(?:Error|Exception)\b.*)")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a load must leave in a store: every name with its length, and three files a process."""

    sizes: Mapping[str, int]
    files: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class StartUp:
    """What a run takes that generates next to nothing."""

    wall_s: float
    cpu_s: float


def memory_directory() -> str:
    """Give where stock DLIO generates, and where kvio stages: in memory, where there is such."""
    shared = "/dev/shm"  # noqa: S108  # a tmpfs
    return shared if os.access(shared, os.W_OK) else tempfile.gettempdir()


def generate_stock(load: Load, work: Path, keep: Path | None) -> tuple[DlioRun, Expected | None]:
    """Generate a load by DLIO alone below *work*, and keep in *keep* what tells it is right.

    Raises:
        UnsupportedError: DLIO failed.
    """
    with tempfile.TemporaryDirectory(prefix="stock-", dir=work) as made:
        folder = Path(made, _FOLDER)
        given = _options(load.format, load.objects, load.record_length, str(folder))
        run = _run([*given, *_STOCK], Path(made), load, {})
        return run, None if keep is None else _kept(folder, keep, load.case.processes)


def start_up(load: Load, work: Path) -> StartUp:
    """Run stock DLIO for one tiny file a rank.

    Raises:
        UnsupportedError: DLIO failed.
    """
    with tempfile.TemporaryDirectory(prefix="start-", dir=work) as made:
        folder = str(Path(made, _FOLDER))
        given = _options(load.format, load.case.processes, 1, folder)
        run = _run([*given, *_STOCK], Path(made), load, {})
    return StartUp(run.wall_s, run.user_s + run.system_s)


def generate(load: Load, library: str, server: Server, prefix: str, work: Path) -> DlioRun:
    """Generate a load through kvio and a library below a prefix of a server's bucket.

    Raises:
        UnsupportedError: DLIO failed; says what it said, without credentials.
    """
    threads = load.case.threads
    options: dict[str, Any] = {
        "endpoint_url": server.url,
        "region": server.region,
        "connections": max(_CONNECTIONS, threads),
        **as_by_hand(max(_PART_BYTES, load.case.nbytes + load.case.nbytes // 64)),
        **signing(library, unsigned=server.unsigned),
    }
    url = f"s3+{library}://{quote(f'{server.bucket}/{prefix}')}"
    settings = {"data": url, "options": options, "write_threads": threads}
    environment = {name: "" for name in ("AWS_SESSION_TOKEN",) if name in os.environ}
    environment |= {name: v for name, v in server.environ.items() if name.startswith("AWS_")}
    environment["KVIO_DLIO"] = json.dumps(settings)
    given = _options(load.format, load.objects, load.record_length, _FOLDER)
    with tempfile.TemporaryDirectory(prefix="through-", dir=work) as made:
        return _run([*given, *_THROUGH_KVIO], Path(made), load, environment, server)


def key_of(prefix: str, name: str) -> str:
    """Give the key of one of the names in `Expected`."""
    return f"{prefix}/{_FOLDER}/{name}"


def _options(form: str, files: int, record_length: int, folder: str) -> list[str]:
    dataset = {
        "format": form,
        "num_files_train": files,
        "num_files_eval": 0,
        "num_samples_per_file": 1,
        "record_length": record_length,
        "record_length_stdev": 0,
        "record_length_resize": 1,
        "data_folder": quoted(folder),
    }
    return [
        "workload=unet3d_a100",
        *(f"++workload.dataset.{name}={value}" for name, value in dataset.items()),
        "++workload.checkpoint.model_size=1",  # it is made, though never saved
        *of_phase(generate=True, train=False),
    ]


def _run(
    options: Sequence[str],
    work: Path,
    load: Load,
    environment: Mapping[str, str],
    server: Server | None = None,
) -> DlioRun:
    ranks = load.case.processes
    try:
        run = run_dlio(
            options, work=work, ranks=ranks, environment=environment, timeout_s=_TIMEOUT_S
        )
    except TimeoutError as exc:
        raise UnsupportedError(f"failed: {load}: {exc}") from None
    if run.status:
        said = _complaint(run.text) if server is None else server.redacted(_complaint(run.text))
        raise UnsupportedError(f"failed: {load}: {said[:300]}")
    return run


def _complaint(text: str) -> str:
    """Find what a run that failed says of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if _COMPLAINT.match(line)]
    return (found or lines or ["it said nothing"])[-1]


def _kept(folder: Path, keep: Path, processes: int) -> Expected:
    """Remember all names and lengths, and copy the first, middle and last file of each process.

    DLIO deals its files, whose names sort as they are numbered, to one rank after the other.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in files]
    chosen: dict[str, Path] = {}
    for rank in range(processes):
        own = range(rank, len(files), processes)
        for at in {own[0], own[len(own) // 2], own[-1]} if own else ():
            chosen[names[at]] = Path(shutil.copyfile(files[at], keep / files[at].name))
    return Expected(dict(zip(names, (p.stat().st_size for p in files), strict=True)), chosen)
