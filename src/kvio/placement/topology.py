"""The CPUs, caches, packages and memory nodes that this process may use, read from sysfs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from kvio.errors import ConfigError
from kvio.filesystem.sysfs import (
    Tree,
    format_cpulist,
    parse_cpulist,
    parse_number,
    tree_at,
)
from kvio.placement.devices import CudaNames, Location, locate_cuda, locate_path

#: A node's distance to itself, as ACPI defines it; all others are ratios to it.
LOCAL_DISTANCE: Final = 10
_NEAR: Final = re.compile(r"path:[^\0]+|cuda:[0-9]{1,4}", re.DOTALL).fullmatch


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """Usable CPUs that share a resource; *number* is its name, or None if it has none."""

    number: int | None
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A machine as one process may use it, at one moment.

    Attributes:
        root: below which it was read; devices are looked up there.
        online: the CPUs that run, allowed or not.
        cores: the usable cores, by package, node, cache and number.
        nodes: the nodes that are online, with or without CPUs and memory.
        memory_nodes: those with memory that this process may take.
        distances: rows and columns as *nodes*; an empty row is unknown.
        remarks: what the kernel said that was not understood, and is taken as unknown.
        cuda: what the numbers of CUDA devices mean to this process.
    """

    root: str
    online: tuple[int, ...]
    cores: tuple[Core, ...]
    nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    distances: tuple[tuple[int, ...], ...]
    remarks: tuple[str, ...]
    cuda: CudaNames

    @classmethod
    def from_system(
        cls,
        root: str | os.PathLike[str] = "/",
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Read the machine below a root, as far as the calling thread may use it.

        Usable are the CPUs that are online and in the thread's mask, which its cpuset bounds.
        What is missing or cannot be understood is unknown, and noted in *remarks*; only without a
        list of CPUs there is no topology.

        Args:
            root: holds ``sys`` and ``proc``.
            environment: of CUDA; by default that of the process if the root is ``/``, else none.

        Raises:
            ConfigError: no list of CPUs is there, one is no list, or none is usable.
        """
        tree = tree_at(root)
        if environment is None:
            environment = os.environ if tree.is_system else {}
        reading = Reading(tree)
        online, usable = reading.cpus()
        nodes = reading.nodes()
        return cls(
            root=tree.root,
            online=online,
            cores=reading.cores(usable, nodes),
            nodes=nodes,
            memory_nodes=reading.memory_nodes(nodes),
            distances=reading.distances(nodes),
            remarks=tuple(reading.remarks),
            cuda=CudaNames.of(environment),
        )

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs that may be used, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def packages(self) -> tuple[CpuGroup, ...]:
        """The sockets with usable CPUs."""
        return self._groups(lambda core: core.package)

    @property
    def numa(self) -> tuple[CpuGroup, ...]:
        """The nodes with usable CPUs."""
        return self._groups(lambda core: core.node)

    @property
    def l3_groups(self) -> tuple[CpuGroup, ...]:
        """The last-level caches with usable CPUs."""
        return self._groups(lambda core: core.l3)

    def distance(self, one: int, other: int) -> int | None:
        """Return the distance between two nodes, 10 being local; None: unknown."""
        if one == other:
            return LOCAL_DISTANCE
        if one not in self.nodes or other not in self.nodes:
            return None
        row = self.distances[self.nodes.index(one)]
        return row[self.nodes.index(other)] if row else None

    def nearest_memory(self, node: int | None) -> int | None:
        """Return the usable memory node that is nearest to a node; None: unknown."""
        if node in self.memory_nodes:
            return node
        if len(self.memory_nodes) == 1:
            return self.memory_nodes[0]
        if node is None:
            return None
        known = [(self.distance(node, other), other) for other in self.memory_nodes]
        distances = [(distance, other) for distance, other in known if distance is not None]
        return min(distances)[1] if distances else None

    def locate(self, near: str) -> Location:
        """Find the nodes of ``path:…`` or ``cuda:N`` now, and explain how.

        Raises:
            ConfigError: it is neither.
        """
        check_near(near)
        kind, _, name = near.partition(":")
        tree = Tree(self.root)
        if kind == "path":
            found = locate_path(tree, name)
        else:
            found = locate_cuda(tree, int(name), self.cuda)
        offline = [node for node in found.nodes if node not in self.nodes]
        if offline:
            why = f"{found.why}; but node {format_cpulist(offline)} is not online"
            return replace(found, nodes=(), why=why)
        return found

    def node_of_path(self, path: str | os.PathLike[str]) -> int | None:
        """Return the node of the device below a path; None: unknown, or several."""
        return self.locate(f"path:{os.fspath(path)}").node

    def node_of_cuda(self, index: int) -> int | None:
        """Return the node of a GPU by its CUDA number; None: unknown."""
        return self.locate(f"cuda:{index}").node

    def _groups(self, name: Callable[[Core], int | None]) -> tuple[CpuGroup, ...]:
        found: dict[int | None, list[int]] = {}
        for core in self.cores:
            found.setdefault(name(core), []).extend(core.cpus)
        return tuple(CpuGroup(number, tuple(sorted(cpus))) for number, cpus in found.items())


def check_near(near: str) -> None:
    """Raise `ConfigError` for a text that is neither ``path:…`` nor ``cuda:N``."""
    if not _NEAR(near):
        raise ConfigError(f"near must be 'path:…' or 'cuda:N', not {near!r:.200}")


# --------------------------------------------------------------------------------------------------
# Read sysfs and procfs: CPUs, nodes, and those that a thread may use.


_CPU: Final = "/sys/devices/system/cpu"
_NODE: Final = "/sys/devices/system/node"
_STATUS: Final = ("/proc/thread-self/status", "/proc/self/status")
_MAX_DISTANCE: Final = 255  # a byte in the ACPI tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The usable CPUs of one core: its hardware threads, ascending.

    Attributes:
        cpus: their numbers.
        l3: the smallest number of all CPUs that share the level 3 cache, which names it.
        node: the NUMA node.
        package: the socket. Each of these is None where the kernel does not report it.
    """

    cpus: tuple[int, ...]
    l3: int | None
    node: int | None
    package: int | None


class Reading:
    """Reads one tree; *remarks* collects values that were not understood and count as unknown."""

    def __init__(self, tree: Tree) -> None:
        self.remarks: list[str] = []
        self._tree = tree
        self._status = self._read_status()

    def cpus(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the CPUs that are online, and those of them that the thread may use.

        Raises:
            ConfigError: neither is known, one is not a list, or none is usable.
        """
        online = self._required(f"{_CPU}/online", self._tree.text(f"{_CPU}/online"))
        allowed = self._required("Cpus_allowed_list", self._status.get("Cpus_allowed_list"))
        if allowed is None and self._tree.is_system:
            allowed = tuple(sorted(os.sched_getaffinity(0)))
        if online is None and allowed is None:
            raise ConfigError(f"no CPUs are listed below {self._tree.root}")
        if online is None or allowed is None:
            missing = "which CPUs are online" if online is None else "the mask of the thread"
            self.remarks.append(f"{missing}: unknown; all CPUs that are named are used")
            only = online or allowed or ()
            online = allowed = only
        usable = tuple(sorted(set(online) & set(allowed)))
        if not usable:
            raise ConfigError(
                f"no CPU is usable: online are {format_cpulist(online) or 'none'}, "
                f"allowed {format_cpulist(allowed) or 'none'}"
            )
        return online, usable

    def nodes(self) -> tuple[int, ...]:
        """Return the nodes that are online; none if the kernel has no NUMA."""
        return self._list(f"{_NODE}/online") or ()

    def memory_nodes(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the nodes with memory that the thread may use."""
        having = self._list(f"{_NODE}/has_memory")
        if having is None:  # absent before Linux 3.8
            having = self._list(f"{_NODE}/has_normal_memory") or ()
        text = self._status.get("Mems_allowed_list")
        allowed = None if text is None else self._parsed("Mems_allowed_list", text)
        return tuple(sorted(set(nodes) & set(having) & set(nodes if allowed is None else allowed)))

    def distances(self, nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the distances of each node to the nodes that are online."""
        return tuple(self._row(f"{_NODE}/node{node}/distance", len(nodes)) for node in nodes)

    def cores(self, usable: tuple[int, ...], nodes: tuple[int, ...]) -> tuple[Core, ...]:
        """Group the usable CPUs; CPUs of different nodes, packages or caches share no core."""
        node_of = {
            cpu: node
            for node in reversed(nodes)  # of nodes that claim one CPU the first has it
            for cpu in self._list(f"{_NODE}/node{node}/cpulist") or ()
        }
        members: dict[tuple[int | None, ...], list[int]] = {}
        for cpu in usable:
            at = f"{_CPU}/cpu{cpu}/topology"
            package = parse_number(self._tree.text(f"{at}/physical_package_id"))
            siblings = self._list(f"{at}/thread_siblings_list") or ()
            first = min(siblings) if cpu in siblings else cpu
            name = (package, node_of.get(cpu), self._l3(cpu), first)
            members.setdefault(name, []).append(cpu)
        ordered = sorted(members.items(), key=lambda item: _unknown_last(item[0]))
        return tuple(
            Core(cpus=tuple(sorted(cpus)), l3=l3, node=node, package=package)
            for (package, node, l3, _), cpus in ordered
        )

    def _l3(self, cpu: int) -> int | None:
        caches = f"{_CPU}/cpu{cpu}/cache"
        for name in reversed(self._tree.names(caches)):  # level 3 is the last
            if parse_number(self._tree.text(f"{caches}/{name}/level")) == 3:
                sharing = self._list(f"{caches}/{name}/shared_cpu_list") or ()
                return min(sharing) if cpu in sharing else None
        return None

    def _row(self, path: str, length: int) -> tuple[int, ...]:
        text = self._tree.text(path)
        if text is None:
            return ()
        row = [parse_number(word) for word in text.split()]
        known = tuple(n for n in row if n is not None and 0 < n <= _MAX_DISTANCE)
        if len(known) == len(row) == length:
            return known
        self.remarks.append(f"{path}: {text.strip()!r:.80} is not {length} distances")
        return ()

    def _read_status(self) -> dict[str, str]:
        text = next(filter(None, map(self._tree.text, _STATUS)), "")
        pairs = (line.partition(":") for line in text.splitlines())
        return {name: value.strip() for name, _, value in pairs}

    def _list(self, path: str) -> tuple[int, ...] | None:
        text = self._tree.text(path)
        return None if text is None else self._parsed(path, text)

    def _parsed(self, source: str, text: str) -> tuple[int, ...] | None:
        try:
            return parse_cpulist(text, source=source)
        except ConfigError as exc:
            self.remarks.append(str(exc))
            return None

    def _required(self, source: str, text: str | None) -> tuple[int, ...] | None:
        return None if text is None else parse_cpulist(text, source=source)


def _unknown_last(name: tuple[int | None, ...]) -> tuple[tuple[bool, int], ...]:
    return tuple((part is None, part or 0) for part in name)
