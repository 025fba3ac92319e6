"""Implement placement: show the NUMA topology and the CPUs and memory of each slot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from kvio.cli.output import print_line
from kvio.placement import Placement, Topology, format_cpulist


class MapBy(StrEnum):
    """The CPUs that a slot is bound to."""

    CORE = "core"
    L3 = "l3"
    NUMA = "numa"
    SOCKET = "socket"


class Order(StrEnum):
    """The order in which slots are assigned to units."""

    PACK = "pack"
    SPREAD = "spread"


class Memory(StrEnum):
    """The NUMA policy for new pages."""

    LOCAL = "local"
    BIND = "bind"
    INTERLEAVE = "interleave"


def placement(
    map_by: Annotated[
        MapBy, typer.Option(help="A slot is one core, or all cores of a cache, a node or a socket.")
    ] = MapBy.CORE,
    order: Annotated[
        Order,
        typer.Option(help="Fill one unit before the next, or assign slots to units in rotation."),
    ] = Order.PACK,
    near: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="Nearest units first: path:/mnt/kv or cuda:0."),
    ] = None,
    memory: Annotated[
        Memory | None,
        typer.Option(
            help="A slot's memory: preferably from the nearest node, only from the nearest node, "
            "or interleaved over all nodes. Default: the process's policy."
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(min=1, max=65536, metavar="N", help="Threads or processes to place.")
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the NUMA nodes, and where threads or processes would be placed.

    Reads the topology from the kernel and changes nothing. Shows only the CPUs and memory that
    this process may use.
    """
    wanted = Placement(
        map_by=map_by.value,
        order=order.value,
        near=near,
        memory=None if memory is None else memory.value,
    )
    topology = Topology.from_system()
    if as_json:
        print_line(json.dumps(_as_json(wanted, topology, slots), indent=1))
        return
    for line in _lines(topology):
        print_line(line)
    print_line()
    print_line(wanted.explain(topology, slots))


def _lines(topology: Topology) -> Iterator[str]:
    """Yield a line for each node, each socket, and the L3 caches."""
    cpus = {group.number: group.cpus for group in topology.numa}
    for node in topology.nodes:
        memory = "memory" if node in topology.memory_nodes else "no memory for this process"
        distances = " ".join(str(topology.distance(node, to) or "?") for to in topology.nodes)
        yield f"node {node}: CPUs {_list(cpus.get(node, ()))}; {memory}; distances {distances}"
    if None in cpus:
        yield f"node unknown: CPUs {_list(cpus[None])}"
    for group in topology.packages:
        name = "unknown" if group.number is None else group.number
        yield f"socket {name}: CPUs {_list(group.cpus)}"
    shared = [_list(group.cpus) for group in topology.l3_groups if group.number is not None]
    yield f"L3 caches: CPUs {' | '.join(shared)}" if shared else "L3 caches: unknown"


def _as_json(wanted: Placement, topology: Topology, slots: int) -> dict[str, Any]:
    near = None if wanted.near is None else asdict(topology.locate(wanted.near))
    return {
        "topology": {
            "cpus": topology.cpus,
            "online": topology.online,
            "nodes": topology.nodes,
            "memory_nodes": topology.memory_nodes,
            "distances": topology.distances,
            "cores": [asdict(core) for core in topology.cores],
            "remarks": topology.remarks,
        },
        "near": near,
        "slots": [asdict(slot) for slot in wanted.slots(topology, slots)],
        "explanation": wanted.explain(topology, slots).splitlines(),
    }


def _list(cpus: tuple[int, ...]) -> str:
    return format_cpulist(cpus) or "none"


COMMANDS: Final = (
    (
        "placement",
        placement,
        "  kvio placement\n"
        "  kvio placement --map-by numa --order spread --slots 8\n"
        "  kvio placement --near path:/mnt/kv --memory bind --json",
    ),
)
