"""Explain a plan: what was chosen, why, and what to do if a wish is not met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from kvio.placement.cpulist import format_cpulist
from kvio.placement.plan import MapBy, Memory, Order, Plan, Unit
from kvio.placement.topology import Topology


def lines(plan: Plan, map_by: MapBy, order: Order, memory: Memory | None) -> Iterator[str]:
    """Yield one line each for the machine, the device, the slots and problems."""
    yield f"usable: {usable(plan.topology)}"
    if plan.near is not None:
        yield f"near: {plan.near.why}"
    yield from _slots(plan)
    if memory == "interleave":
        yield f"memory: interleaved over {_names('node', plan.topology.memory_nodes)}"
    for note in _notes(plan, map_by, order, memory):
        yield f"note: {note}"


def one_line(text: str) -> str:
    """Escape characters that cannot be printed: paths and mounts may have any."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def usable(topology: Topology) -> str:
    """Describe the part of a machine that may be used."""
    cpus, online = len(topology.cpus), len(topology.online)
    count = f"{cpus}" if cpus == online else f"{cpus} of {online} online"
    return (
        f"{count} CPUs ({_list(topology.cpus)}): {_many(len(topology.cores), 'core')}, "
        f"{_many(len(topology.numa), 'node')}, {_many(len(topology.packages), 'socket')}"
    )


def _slots(plan: Plan) -> Iterator[str]:
    numbered = enumerate(plan.places)
    for (unit, node), run in groupby(numbered, key=lambda item: item[1]):
        indices = [index for index, _ in run]
        name = "slots" if len(indices) > 1 else "slot"
        memory = "" if node is None else f", memory of node {node}"
        yield f"{name} {_list(indices)}: CPUs {_list(unit.cpus)} ({_where(unit)}){memory}"


def _where(unit: Unit) -> str:
    distance = "" if unit.distance is None else f", distance {unit.distance}"
    return f"{_names('socket', unit.packages)}, {_names('node', unit.nodes)}{distance}"


def _notes(plan: Plan, map_by: MapBy, order: Order, memory: Memory | None) -> Iterator[str]:
    topology = plan.topology
    yield from _about_near(plan)
    yield from _about_units(plan, map_by, order)
    if len(topology.cpus) < len(topology.online):
        yield (
            f"CPUs {_list(set(topology.online) - set(topology.cpus))} are online and outside this "
            "thread's mask: its cpuset, taskset or mpirun's binding keeps them away"
        )
    cores = len(topology.cores)
    if len(plan.places) > cores:
        most = -(-len(plan.places) // cores)
        yield f"{_many(cores, 'core')} for {len(plan.places)} slots: up to {most} share a core"
    if memory is not None:
        yield from _about_memory(plan, memory)
    for remark in topology.remarks:
        yield f"taken as unknown: {remark}"


def _about_near(plan: Plan) -> Iterator[str]:
    if plan.near is None:
        return
    if not plan.near.nodes and len(plan.topology.numa) > 1:
        yield (
            "near is without effect, as that node is unknown; if you know it, keep the process "
            "there with numactl --cpunodebind=NODE"
        )
    elif plan.near.nodes and all(unit.distance is None for unit in plan.units):
        yield "near is without effect: the kernel reports no distance to a usable CPU"
    elif plan.near.nodes and not set(plan.units[0].nodes) & set(plan.near.nodes):
        yield (
            f"node {_list(plan.near.nodes)} has no CPU that may be used; the nearest that has is "
            f"{_names('node', plan.units[0].nodes)}"
        )


def _about_units(plan: Plan, map_by: MapBy, order: Order) -> Iterator[str]:
    topology = plan.topology
    if not topology.nodes:
        yield "the kernel reports no NUMA nodes"
    elif len(topology.numa) == 1:
        yield "all usable CPUs are on one node: near and far are the same here"
    if len(plan.units) == 1 and order == "spread":
        yield f"there is one unit by {map_by}, so that spread is the same as pack"
    if map_by == "l3" and any(core.l3 is None for core in topology.cores):
        yield "CPUs without a known L3 cache are grouped by node"
    if map_by == "numa" and any(core.node is None for core in topology.cores):
        yield "CPUs without a known node are grouped"
    if map_by == "socket" and any(core.package is None for core in topology.cores):
        yield "CPUs without a known socket are grouped"


def _about_memory(plan: Plan, memory: Memory) -> Iterator[str]:
    topology = plan.topology
    if memory == "interleave":
        bare = set(topology.memory_nodes) - {group.number for group in topology.numa}
        if bare:
            yield (
                f"nodes {_list(bare)} have memory but no usable CPU (it may be a GPU's, or far): "
                "interleaving takes it too"
            )
        return
    for unit, node in dict.fromkeys(plan.places):
        where = _names("node", unit.nodes)
        if node is None:
            yield _no_memory_node(unit, topology)
        elif unit.nodes != (node,):
            yield f"{where} is not a node whose memory may be taken; nearest is node {node}"


def _no_memory_node(unit: Unit, topology: Topology) -> str:
    cpus = f"CPUs {_list(unit.cpus)}"
    if not topology.memory_nodes:
        return f"{cpus} have no memory node: the kernel reports none that may be used"
    if len(unit.nodes) > 1:
        several = _names("node", unit.nodes)
        return f"{cpus} have no one memory node, being on {several}: map by numa, l3 or core"
    return f"{cpus} have no memory node: their distances are unknown"


def _names(kind: str, numbers: Iterable[int | None]) -> str:
    known = [number for number in numbers if number is not None]
    if not known:
        return f"{kind} unknown"
    return f"{kind}{'s' if len(known) > 1 else ''} {_list(known)}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _list(numbers: Iterable[int]) -> str:
    return format_cpulist(numbers) or "none"
