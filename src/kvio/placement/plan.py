"""Assign slots to units (cores, caches, nodes, sockets) in order, with memory near them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final, Literal, TypeAlias

from kvio.placement.devices import Location
from kvio.placement.reading import Core
from kvio.placement.topology import Topology

MapBy: TypeAlias = Literal["core", "l3", "numa", "socket"]
Order: TypeAlias = Literal["pack", "spread"]
Memory: TypeAlias = Literal["local", "bind", "interleave"]

_Name: TypeAlias = tuple[int | None, ...]
#: What tells units apart. A cache belongs to one node: where the kernel counts one cache to
#: several nodes (sub-NUMA clustering), each node has its part of it.
_NAMES: Final[dict[MapBy, Callable[[Core], _Name]]] = {
    "core": lambda core: (core.package, core.node, core.l3, core.cpus[0]),
    "l3": lambda core: (core.package, core.node, core.l3),
    "numa": lambda core: (core.node,),
    "socket": lambda core: (core.package,),
}
#: From the largest to the smallest: what spreading deals over first.
_LEVELS: Final[tuple[Callable[[Core], int | None], ...]] = (
    lambda core: core.package,
    lambda core: core.node,
    lambda core: core.l3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The unit a slot is bound to: one core, or the cores of a cache, a node or a socket.

    Attributes:
        cores: its usable cores, at least one.
        distance: from the device's nodes to the nearest node of the unit; None: not asked for,
            or unknown.
    """

    cores: tuple[Core, ...]
    distance: int | None

    @property
    def cpus(self) -> tuple[int, ...]:
        """Its usable CPUs, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def nodes(self) -> tuple[int | None, ...]:
        """The nodes its cores are on."""
        return tuple(dict.fromkeys(core.node for core in self.cores))

    @property
    def packages(self) -> tuple[int | None, ...]:
        """The packages its cores are in."""
        return tuple(dict.fromkeys(core.package for core in self.cores))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The slots that were chosen, with the reasons.

    Attributes:
        topology: what they were made from.
        near: where the device is; None: not asked for.
        units: in the order slots are dealt to them.
        places: the unit and the memory node of each slot.
    """

    topology: Topology
    near: Location | None
    units: tuple[Unit, ...]
    places: tuple[tuple[Unit, int | None], ...]


def make_plan(
    topology: Topology,
    n: int,
    *,
    map_by: MapBy,
    order: Order,
    near: str | None,
    memory: Memory | None,
) -> Plan:
    """Assign *n* slots to the units of a machine in turn."""
    location = None if near is None else topology.locate(near)
    units = _units(topology, map_by, order, () if location is None else location.nodes)
    wants_node = memory in ("local", "bind")
    turns = [
        (unit, _memory_node(topology, unit) if wants_node else None)
        for unit in _turns(units, order)
    ]
    return Plan(
        topology=topology,
        near=location,
        units=units,
        places=tuple(turns[index % len(turns)] for index in range(n)),
    )


def _turns(units: Sequence[Unit], order: Order) -> list[Unit]:
    """Repeat each unit once per core; further slots begin again."""
    if order == "pack":
        return [unit for unit in units for _ in unit.cores]
    rounds = max(len(unit.cores) for unit in units)
    return [unit for turn in range(rounds) for unit in units if turn < len(unit.cores)]


def _units(
    topology: Topology, map_by: MapBy, order: Order, near: Sequence[int]
) -> tuple[Unit, ...]:
    """Group cores into units and order them: the nearest first, else by number.

    To spread, units as near as each other are taken from every package, node and cache in turn.
    """
    members: dict[_Name, list[Core]] = {}
    for core in sorted(topology.cores, key=_number):
        members.setdefault(_NAMES[map_by](core), []).append(core)
    classes: dict[int | None, list[Unit]] = {}
    for cores in members.values():
        distance = _distance(topology, cores, near)
        classes.setdefault(distance, []).append(Unit(cores=tuple(cores), distance=distance))
    by_distance = sorted(classes.items(), key=lambda item: (item[0] is None, item[0] or 0))
    levels = _LEVELS if order == "spread" else ()
    return tuple(chain.from_iterable(_in_turn(units, levels) for _, units in by_distance))


def _in_turn(
    units: Sequence[Unit], levels: Sequence[Callable[[Core], int | None]]
) -> Iterable[Unit]:
    if not levels:
        return units
    groups: dict[int | None, list[Unit]] = {}
    for unit in units:
        groups.setdefault(levels[0](unit.cores[0]), []).append(unit)
    columns = [_in_turn(group, levels[1:]) for group in groups.values()]
    return _present(chain.from_iterable(zip_longest(*columns)))


def _present(units: Iterable[Unit | None]) -> Iterator[Unit]:
    return (unit for unit in units if unit is not None)


def _distance(topology: Topology, cores: Iterable[Core], near: Sequence[int]) -> int | None:
    nodes = {core.node for core in cores if core.node is not None}
    distances = (topology.distance(device, node) for device in near for node in nodes)
    return min((distance for distance in distances if distance is not None), default=None)


def _memory_node(topology: Topology, unit: Unit) -> int | None:
    """Return the node that is nearest to all cores of a unit, if there is exactly one."""
    nearest = {topology.nearest_memory(node) for node in unit.nodes}
    return nearest.pop() if len(nearest) == 1 else None


def _number(core: Core) -> tuple[tuple[bool, int], ...]:
    parts = (core.package, core.node, core.l3, core.cpus[0])
    return tuple((part is None, part or 0) for part in parts)
