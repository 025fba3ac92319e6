"""Machines as small trees of /sys and /proc, written file by file as the kernel lays them out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CPU: Final = "sys/devices/system/cpu"
NODE: Final = "sys/devices/system/node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A machine in numbers.

    CPUs are numbered as Linux does on most machines: one thread of each core first, in the order
    of sockets, nodes and caches, then their siblings.

    Attributes:
        bare_nodes: numbers of nodes that have memory and no CPUs.
        offline: numbers of nodes that are possible and not online; their CPUs are not either.
        memoryless: numbers of nodes without memory.
        allowed, mems: the mask and the memory nodes of the process; None: all.
        numa: whether the kernel reports nodes at all.
    """

    sockets: int = 1
    nodes: int = 1
    caches: int = 1
    cores: int = 4
    threads: int = 1
    bare_nodes: tuple[int, ...] = ()
    offline: tuple[int, ...] = ()
    memoryless: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    mems: tuple[int, ...] | None = None
    numa: bool = True

    @property
    def all_cores(self) -> int:
        return self.sockets * self.nodes * self.caches * self.cores

    @property
    def all_nodes(self) -> int:
        return self.sockets * self.nodes

    def node_of(self, cpu: int) -> int:
        return cpu % self.all_cores // (self.caches * self.cores)

    def socket_of(self, cpu: int) -> int:
        return self.node_of(cpu) // self.nodes

    def cache_of(self, cpu: int) -> int:
        return cpu % self.all_cores // self.cores

    def core_of(self, cpu: int) -> int:
        return cpu % self.all_cores

    @property
    def online(self) -> tuple[int, ...]:
        cpus = range(self.all_cores * self.threads)
        return tuple(cpu for cpu in cpus if self.node_of(cpu) not in self.offline)

    @property
    def usable(self) -> tuple[int, ...]:
        allowed = self.online if self.allowed is None else self.allowed
        return tuple(cpu for cpu in self.online if cpu in allowed)

    @property
    def online_nodes(self) -> tuple[int, ...]:
        having_cpus = (node for node in range(self.all_nodes) if node not in self.offline)
        return tuple(sorted({*having_cpus, *self.bare_nodes})) if self.numa else ()

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        allowed = self.online_nodes if self.mems is None else self.mems
        return tuple(n for n in self.online_nodes if n not in self.memoryless and n in allowed)

    def distance(self, one: int, other: int) -> int:
        if one == other:
            return 10
        if one >= self.all_nodes or other >= self.all_nodes:
            return 80
        return 12 if one // self.nodes == other // self.nodes else 32


SHAPES: Final[Mapping[str, Shape]] = {
    "one node": Shape(),
    "two sockets": Shape(sockets=2),
    "SMT siblings": Shape(sockets=2, cores=3, threads=2),
    "four nodes a socket": Shape(sockets=2, nodes=4, caches=2, cores=2, threads=2),
    "memory nodes without CPUs": Shape(cores=8, bare_nodes=(1, 2, 3)),
    "a node without memory": Shape(sockets=2, memoryless=(1,)),
    "an offline node": Shape(sockets=3, cores=2, offline=(1,)),
    "a cpuset subset": Shape(sockets=2, cores=4, threads=2, allowed=(1, 5, 6, 13), mems=(1,)),
    "one CPU of one core": Shape(sockets=2, threads=2, allowed=(9,)),
    "no NUMA in the kernel": Shape(sockets=2, numa=False),
}


def put(root: Path, path: str, text: str) -> None:
    """Write one of the kernel's files."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, errors="surrogateescape")


def link(root: Path, path: str, target: str) -> None:
    """Make a relative link to another path of the tree, as all links of sysfs are."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(root / target.lstrip("/"), place.parent))


def plain(numbers: Iterable[int]) -> str:
    """Write a list without ranges, by no code of kvio."""
    return ",".join(map(str, numbers)) + "\n"


def build(root: Path, shape: Shape) -> Path:
    """Write a machine below an empty directory."""
    put(root, f"{CPU}/online", plain(shape.online))
    for cpu in shape.online:
        _put_cpu(root, shape, cpu)
    if shape.numa:
        _put_nodes(root, shape)
    allow(root, shape.allowed or shape.online, shape.mems or shape.online_nodes)
    return root


def allow(root: Path, cpus: Iterable[int], mems: Iterable[int]) -> None:
    """Set what the process may use."""
    lists = f"Cpus_allowed_list:\t{plain(cpus)}Mems_allowed:\t1\nMems_allowed_list:\t{plain(mems)}"
    put(root, "proc/self/status", f"Name:\tpython3\nPid:\t7\nCpus_allowed:\tff\n{lists}")


def _put_cpu(root: Path, shape: Shape, cpu: int) -> None:
    at = f"{CPU}/cpu{cpu}"
    put(root, f"{at}/topology/physical_package_id", f"{shape.socket_of(cpu)}\n")
    put(root, f"{at}/topology/core_id", f"{shape.core_of(cpu)}\n")
    put(root, f"{at}/topology/thread_siblings_list", _sharing(shape, shape.core_of, cpu))
    for index, (level, group) in enumerate(((1, shape.core_of), (3, shape.cache_of))):
        put(root, f"{at}/cache/index{index}/level", f"{level}\n")
        put(root, f"{at}/cache/index{index}/shared_cpu_list", _sharing(shape, group, cpu))


def _sharing(shape: Shape, group: Callable[[int], int], cpu: int) -> str:
    return plain(other for other in shape.online if group(other) == group(cpu))


def _put_nodes(root: Path, shape: Shape) -> None:
    put(root, f"{NODE}/online", plain(shape.online_nodes))
    put(root, f"{NODE}/possible", plain({*shape.online_nodes, *shape.offline}))
    having = [node for node in shape.online_nodes if node not in shape.memoryless]
    put(root, f"{NODE}/has_memory", plain(having))
    for node in shape.online_nodes:
        cpus = [cpu for cpu in shape.online if shape.node_of(cpu) == node]
        row = " ".join(str(shape.distance(node, other)) for other in shape.online_nodes)
        put(root, f"{NODE}/node{node}/cpulist", plain(cpus) if cpus else "\n")
        put(root, f"{NODE}/node{node}/distance", f"{row}\n")
    for node in shape.offline:  # a stale directory, of which nothing may be taken
        put(root, f"{NODE}/node{node}/cpulist", plain(shape.online))


def pci(root: Path, address: str, node: int | None) -> str:
    """Add a PCI device below a bridge that knows no node; None: no file reports one."""
    directory = f"/sys/devices/pci0000:00/0000:00:01.0/{address}"
    put(root, "/sys/devices/pci0000:00/0000:00:01.0/numa_node", "-1\n")
    if node is not None:
        put(root, f"{directory}/numa_node", f"{node}\n")
    else:
        (root / directory[1:]).mkdir(parents=True)
    link(root, f"/sys/bus/pci/devices/{address}", directory)
    return directory


def block(root: Path, directory: str, number: str) -> str:
    """Add a block device, named and numbered as the kernel links them."""
    put(root, f"{directory}/dev", f"{number}\n")
    link(root, f"/sys/dev/block/{number}", directory)
    link(root, f"/sys/class/block/{Path(directory).name}", directory)
    return directory


def nvme(root: Path, index: int, node: int | None, number: str) -> str:
    """Add an NVMe disk on a controller of its own."""
    device = pci(root, f"0000:0{index + 1}:00.0", node)
    return block(root, f"{device}/nvme/nvme{index}/nvme{index}n1", number)


def partition(root: Path, disk: str, number: str) -> str:
    """Add the first partition of a disk."""
    directory = block(root, f"{disk}/{Path(disk).name}p1", number)
    put(root, f"{directory}/partition", "1\n")
    return directory


def mapped(root: Path, name: str, number: str, parts: Iterable[str]) -> str:
    """Add a device that the kernel makes of others."""
    directory = block(root, f"/sys/devices/virtual/block/{name}", number)
    for part in parts:
        link(root, f"{directory}/slaves/{Path(part).name}", part)
    return directory


def network(root: Path, name: str, address: str, node: int | None) -> str:
    """Add a network device that is up."""
    device = pci(root, address, node)
    directory = f"{device}/net/{name}"
    put(root, f"{directory}/operstate", "up\n")
    link(root, f"{directory}/device", device)
    link(root, f"/sys/class/net/{name}", directory)
    return directory


def mount(
    root: Path, number: str, point: str, kind: str, source: str, *, options: str = "rw"
) -> None:
    """Mount something; later mounts hide earlier ones."""
    file = root / "proc/self/mountinfo"
    before = file.read_text() if file.exists() else "22 1 0:21 / /proc rw - proc proc rw\n"
    put(
        root,
        "proc/self/mountinfo",
        f"{before}30 1 {number} / {point} rw,relatime shared:1 - {kind} {source} {options}\n",
    )
