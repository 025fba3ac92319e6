"""What the figures were taken on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import kvio
from benchmarks.blockloop import COMPILER
from kvio._native import crc32c_implementation


def facts(root: Path) -> dict[str, Any]:
    """Collect machine, kernel, file system, mount options, versions and load."""
    with kvio.open_store("hybrid", root=root) as store:
        can = store.capabilities
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "file_system": can.medium,
        "device": _device(root),
        "publish": can.publish,
        "direct_io": can.direct_io,
        "python": platform.python_version(),
        "kvio": kvio.__version__,
        "kvio_commit": _output(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"
        ),
        "crc32c": crc32c_implementation(),
        "compiler": _output(COMPILER, "--version"),
        "fio": _output("fio", "--version") if shutil.which("fio") else None,
        "load_before": os.getloadavg(),
    }


def line(of: dict[str, Any]) -> str:
    """Say the main facts in one line."""
    load = ", ".join(f"{x:.2f}" for x in of["load_before"])
    return (
        f"# {of['cpu']}, {of['cores']} cores, {of['memory']}, Linux {of['kernel']}, "
        f"{of['file_system']}, Python {of['python']}, kvio {of['kvio']} ({of['kvio_commit']}), "
        f"crc32c {of['crc32c']}, load {load}"
    )


def _field(path: str, name: str) -> str:
    for text in Path(path).read_text().splitlines():
        if text.startswith(name):
            return text.split(":", 1)[1].strip()
    return "unknown"


def _device(root: Path) -> str:
    wanted = f"{os.major(root.stat().st_dev)}:{os.minor(root.stat().st_dev)}"
    for text in Path("/proc/self/mountinfo").read_text().splitlines():
        if text.split()[2] == wanted:
            return text.split(" - ", 1)[1]
    return "unknown"


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else "unknown"
