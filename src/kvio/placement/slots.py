"""Slots: CPUs and a memory node for each of n threads or processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kvio.errors import ConfigError
from kvio.placement import explaining
from kvio.placement.plan import MapBy, Memory, Order, Plan, make_plan
from kvio.placement.topology import Topology, check_near


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
        lines = explaining.lines(self._plan(topology, n), self.map_by, self.order, self.memory)
        return "\n".join(map(explaining.one_line, [wish, *lines]))

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
