"""A machine with two sockets, a memory node in each, and a disk at the second: made by QEMU."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.numa.initramfs import write_initramfs

#: Programs that a guest takes, and the Debian packages they come in.
PROGRAMS: Final = {"qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs"}
#: Ten seconds on an idle machine; nothing but a failure takes this long.
BOOT_S: Final = 200
_SBIN: Final = "/usr/sbin:/sbin"
_SECTOR: Final = 512
_FIRST_SECTOR: Final = 2048
_DISK_BYTES: Final = 16 << 20
#: Processors 0 and 1 with memory node 0, 2 and 3 with node 1; a root port of PCI Express on a bus
#: of node 1, and the disk there. The second serial line is for results.
_MACHINE: Final = (
    "-accel tcg -cpu max -M q35 -no-reboot -nodefaults -display none"
    " -m 640 -smp 4,sockets=2,cores=2"
    " -object memory-backend-ram,id=m0,size=320M -object memory-backend-ram,id=m1,size=320M"
    " -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1"
    " -numa dist,src=0,dst=1,val=21"
    " -device pxb-pcie,id=pxb1,bus_nr=128,bus=pcie.0,numa_node=1"
    " -device pcie-root-port,id=rp1,bus=pxb1,chassis=1 -device nvme,serial=kv1,drive=disk,bus=rp1"
)
#: Pages that the kernel moves by itself would say nothing of who placed them.
_KERNEL_OPTIONS: Final = "console=ttyS0 panic=-1 numa_balancing=disable loglevel=4"


@dataclass(frozen=True, slots=True)
class Guest:
    """What a guest said before it ended.

    Attributes:
        facts: what was seen, by the name of the observation.
        errors: tracebacks of observations that failed.
        console: what its kernel and its Python printed.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    console: str = ""

    def __getitem__(self, name: str) -> Any:
        """Return what was seen; fail with what went wrong in the guest."""
        if name in self.errors:
            pytest.fail(f"in the guest:\n{self.errors[name]}", pytrace=False)
        if name not in self.facts:
            pytest.fail(f"the guest said nothing of {name}; its console:\n{self.console[-6000:]}")
        return self.facts[name]


def find(program: str) -> str:
    """Find a program of `PROGRAMS`, or skip."""
    path = os.environ.get("PATH", os.defpath)
    found = shutil.which(program, path=f"{path}:{_SBIN}")
    if found is None:
        pytest.skip(f"needs {program} (Debian package {PROGRAMS[program]})")
    return found


def boot(kernel: Path, work: Path) -> Guest:
    """Run a guest to its end, and give what it said.

    *kernel* must have what Debian's cloud kernels have built in: NUMA, PCI Express, NVMe, ext4.
    """
    qemu, disk, initramfs = find("qemu-system-x86_64"), work / "disk.img", work / "initramfs.gz"
    console, results = work / "console.txt", work / "results.jsonl"
    _write_disk(disk)
    write_initramfs(initramfs)
    command = [
        *(qemu, *_MACHINE.split(), "-drive", f"file={disk},if=none,id=disk,format=raw"),
        *("-kernel", str(kernel), "-initrd", str(initramfs), "-append", _KERNEL_OPTIONS),
        *("-serial", f"file:{console}", "-serial", f"file:{results}"),
    ]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=BOOT_S, check=False)
        said = f"\nQEMU ended with {ended.returncode}: {ended.stderr}"
    except subprocess.TimeoutExpired:
        said = f"\nQEMU was ended after {BOOT_S} s"
    initramfs.unlink()
    disk.unlink()
    shown = console.read_text(errors="replace") if console.exists() else ""
    guest = Guest(console=shown + said)
    for line in results.read_text().splitlines() if results.exists() else ():
        reported = json.loads(line)
        kept = guest.errors if "error" in reported else guest.facts
        kept[reported["name"]] = reported["error"] if "error" in reported else reported["seen"]
    return guest


def _write_disk(path: Path) -> None:
    """Make a disk with one partition, and a file system with one file on it."""
    tree = path.with_suffix(".tree")
    tree.mkdir()
    (tree / "block").write_bytes(b"a block")
    sectors = _DISK_BYTES // _SECTOR - _FIRST_SECTOR
    entry = struct.pack("<4xB3xII", 0x83, _FIRST_SECTOR, sectors)  # 0x83: Linux
    with path.open("wb") as disk:
        disk.write(bytes(446) + entry + bytes(48) + b"\x55\xaa")
        disk.truncate(_DISK_BYTES)
    offset = f"offset={_FIRST_SECTOR * _SECTOR}"
    made = [find("mke2fs"), "-q", "-F", "-t", "ext4", "-d", str(tree), "-E", offset, str(path)]
    subprocess.run([*made, f"{sectors * _SECTOR >> 10}k"], check=True, timeout=60)
