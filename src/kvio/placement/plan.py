"""Assign slots (CPUs and a memory node) to threads and processes, and explain the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest
from typing import Final, Literal, TypeAlias, get_args

from kvio.errors import ConfigError
from kvio.filesystem.sysfs import format_cpulist
from kvio.placement.devices import Location
from kvio.placement.topology import Core, Topology, check_near


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one thread or process.

    Attributes:
        cpus: where it may run, ascending, at least one.
        node: whose memory it should take; None: unknown, or not asked for.
    """

    cpus: tuple[int, ...]
    node: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A wish for the places of slots, for any machine; `slots` applies it to one.

    Attributes:
        map_by: what a slot is bound to: one core, or all cores of an L3 cache, of a NUMA node or
            of a socket.
        order: ``pack`` gives a unit as many slots as it has cores before the next one gets any;
            ``spread`` gives each unit one slot in turn. When every core has a slot, both begin
            again.
        near: ``path:…`` or ``cuda:N``: units nearer to that device come first. Where its node is
            unknown, nothing is guessed, and `explain` says why.
        memory: ``local`` and ``bind`` give a slot the memory node that is nearest to its CPUs.
            ``interleave`` deals pages over all memory nodes, so that no slot has one.
    """

    map_by: MapBy = "core"
    order: Order = "pack"
    near: str | None = None
    memory: Memory | None = None

    def __post_init__(self) -> None:
        _check("map_by", self.map_by, get_args(MapBy))
        _check("order", self.order, get_args(Order))
        if self.memory is not None:
            _check("memory", self.memory, get_args(Memory))
        if self.near is not None:
            check_near(self.near)

    def slots(self, topology: Topology, n: int) -> tuple[Slot, ...]:
        """Return the slots of *n* threads or processes, the same for the same machine.

        Slots have usable CPUs only, and memory nodes that have memory and are allowed. No core is
        given to two slots more than to another core. Nothing is read but, for *near*, the tree
        that the topology came from.
        """
        return tuple(Slot(unit.cpus, node) for unit, node in self._plan(topology, n).places)

    def explain(self, topology: Topology, n: int) -> str:
        """Return lines that explain the slots, and what to do if a wish is not met."""
        wish = f"{n} {'slot' if n == 1 else 'slots'} by {self.map_by}, {self.order}"
        wish += f", near {self.near}" if self.near is not None else ""
        wish += f", memory {self.memory}" if self.memory is not None else ""
        lines = explanation(self._plan(topology, n), self.map_by, self.order, self.memory)
        return "\n".join(map(one_line, [wish, *lines]))

    def _plan(self, topology: Topology, n: int) -> Plan:
        if n < 1:
            raise ConfigError(f"slots: at least 1, not {n}")
        return make_plan(
            topology,
            n,
            map_by=self.map_by,
            order=self.order,
            near=self.near,
            memory=self.memory,
        )


def _check(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        *most, last = (f"'{choice}'" for choice in choices)
        raise ConfigError(f"{name} must be {', '.join(most)} or {last}, not {value!r:.80}")


# --------------------------------------------------------------------------------------------------
# Assign slots to units (cores, caches, nodes, sockets) in order, with memory near them.


MapBy: TypeAlias = Literal["core", "l3", "numa", "socket"]
Order: TypeAlias = Literal["pack", "spread"]
Memory: TypeAlias = Literal["local", "bind", "interleave"]

_Name: TypeAlias = tuple[int | None, ...]
#: What distinguishes units. A cache belongs to one node: where the kernel counts one cache to
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


# --------------------------------------------------------------------------------------------------
# Explain a plan: what was chosen, why, and what to do if a wish is not met.


def explanation(plan: Plan, map_by: MapBy, order: Order, memory: Memory | None) -> Iterator[str]:
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
