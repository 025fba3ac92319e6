"""Where threads, processes and their memory belong on a machine with several NUMA nodes.

`Topology` is the machine as this process may use it, `Placement` a wish, and `Placement.slots`
what the wish means there. `applied`, `pin` and `place_memory` make a slot real, and `verify` asks
the kernel.
"""

from __future__ import annotations

from kvio.filesystem.sysfs import format_cpulist, parse_cpulist
from kvio.placement.applying import (
    Applied,
    Verification,
    applied,
    memory_node,
    pin,
    place_memory,
    thread_placer,
    verify,
)
from kvio.placement.devices import Location
from kvio.placement.plan import MapBy, Memory, Order, Placement, Slot
from kvio.placement.topology import Core, CpuGroup, Topology

__all__ = [
    "Applied",
    "Core",
    "CpuGroup",
    "Location",
    "MapBy",
    "Memory",
    "Order",
    "Placement",
    "Slot",
    "Topology",
    "Verification",
    "applied",
    "format_cpulist",
    "memory_node",
    "parse_cpulist",
    "pin",
    "place_memory",
    "thread_placer",
    "verify",
]
