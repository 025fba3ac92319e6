"""Read sysfs and procfs: CPUs, nodes, and those that a thread may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from kvio.errors import ConfigError
from kvio.filesystem.sysfs import Tree
from kvio.placement.cpulist import format_cpulist, parse_cpulist, parse_number

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
        package: the socket. Each of these is None where the kernel does not tell.
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
