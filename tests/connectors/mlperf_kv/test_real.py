"""The unmodified program on kvio: what it reports, and the bytes that it reads."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio.connectors.mlperf_kv import KvioBackend
from tests.connectors.mlperf_kv import real

pytestmark = pytest.mark.slow

_ARGUMENTS: Final = (
    *("--model", "tiny-1b", "--num-users", "2", "--duration", "4", "--gpu-mem-gb", "0"),
    *("--generation-mode", "none", "--storage-capacity-gb", "0.5", "--log-level", "WARNING"),
    *("--seed", "1"),
)
#: Short prompts, and users that do not wait.
_USERS: Final = {
    "context_range": [64, 256],
    "generation_range": [50, 100],
    "think_time_range": [0.05, 0.05],
}
_CONFIGURATION: Final = {
    "user_templates": {"chatbot": _USERS, "coding": _USERS, "document": _USERS}
}
_LOOK: Final = """
import inspect, json, sys
from pathlib import Path
from kvio.connectors.mlperf_kv.program import load
program = load(Path(sys.argv[1]))
base = program.names["StorageBackend"]
print(json.dumps({
    "methods": {
        name: list(inspect.signature(method).parameters)
        for name, method in vars(base).items()
        if inspect.isfunction(method) and method.__module__ == base.__module__
    },
    "timing": list(inspect.signature(program.timing).parameters),
    "entry": list(inspect.signature(program.stock).parameters),
}))
"""


@pytest.fixture(scope="module")
def program() -> Path:
    """The folder of the program."""
    return real.folder()


def _python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _looked_at(program: Path) -> Any:
    done = _python("-c", _LOOK, program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_backend_has_every_method_of_the_programs_interface(program: Path) -> None:
    """With the same parameters; its timings are made as ours are."""
    found = _looked_at(program)

    for name, parameters in found["methods"].items():
        own = inspect.signature(getattr(KvioBackend, name)).parameters
        assert list(own) == parameters, name
    assert sorted(found["timing"]) == ["device", "host", "total"]
    assert found["entry"] == ["base_path"]


@pytest.mark.parametrize("backend", ["memory", "posix-tmpfile", "posix-direct", "hybrid", "tier"])
def test_the_program_runs_and_reports(program: Path, disk_path: Path, backend: str) -> None:
    """Reads and writes of its storage tier, device and host apart, went through kvio."""
    name = "posix-tmpfile" if backend == "tier" else backend
    store = f"{name}://{disk_path}/kv?create=true&durability=visible"
    if backend == "posix-direct":
        try:
            kvio.open_store(store).close()
        except kvio.UnsupportedError as exc:
            pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    configuration, output = disk_path / "configuration.yaml", disk_path / "results.json"
    configuration.write_text(json.dumps(_CONFIGURATION))

    done = _python(
        *("-m", "kvio.connectors.mlperf_kv", "--program", program),
        *("--store", "memory" if backend == "memory" else store),
        *(("--stage", "64MiB") if backend == "tier" else ()),
        *("--", *_ARGUMENTS, "--cpu-mem-gb", "0"),
        *("--config", configuration, "--output", output),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("[KVIO]"))
    assert "failed 0" in line
    assert "wrote 0 entries" not in line
    assert "read 0 (" not in line
    stats = json.loads(output.read_text())["summary"]["cache_stats"]
    for verb in ("read", "write"):
        for part in ("", "device_", "host_"):
            assert stats[f"storage_{verb}_{part}p95_ms"] >= 0
    assert stats["tier_storage_kv_bytes_read_gb"] > 0


def test_one_trace_reads_the_same_bytes_on_stock_and_kvio(program: Path, disk_path: Path) -> None:
    """Through the program's own cache, with moves between tiers and evictions."""
    found = {}
    for tier in ("stock", "posix-tmpfile", "hybrid"):
        done = _python(
            *("-m", "benchmarks.scenarios.mlperf_kv.trace", "--program", program, "--tier", tier),
            *("--root", disk_path / tier, "--trust-fsync"),
            PYTHONPATH=str(Path(__file__).resolve().parents[3]),
        )
        assert done.returncode == 0, done.stderr
        found[tier] = json.loads(done.stdout.splitlines()[-1])

    assert found["stock"]["wrong"] == 0
    assert found["stock"]["deletes"] > 0
    assert found["posix-tmpfile"] == found["stock"]
    assert found["hybrid"] == found["stock"]
