"""The CPUs, caches, packages and memory nodes that this process may use, and their distances."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from kvio.errors import ConfigError
from kvio.filesystem.sysfs import Tree, tree_at
from kvio.placement.cpulist import format_cpulist
from kvio.placement.devices import Location, locate_path
from kvio.placement.gpus import CudaNames, locate_cuda
from kvio.placement.reading import Core, Reading

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
        What is missing or cannot be understood is unknown, and told in *remarks*; only without a
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
