"""Slots for the threads of a pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from kvio.errors import KvioError
from kvio.placement.applying import pin
from kvio.placement.slots import Placement, Slot
from kvio.placement.topology import Topology


def thread_placer(placement: Placement, threads: int) -> Callable[[int], None]:
    """Give what each of a pool's threads calls first, with its number: it moves to its slot.

    The slots are decided here, once; threads beyond *threads* begin again with the first. What a
    machine withholds is done without and warned of: a pool goes on wherever its threads run.

    Raises:
        ConfigError: the placement cannot be on this machine.
    """
    slots = placement.slots(Topology.from_system(), threads)

    def place(number: int) -> None:
        said = _pin(slots[number % len(slots)], placement)
        if said:
            warnings.warn(f"thread {number} is not placed as asked: {said}", stacklevel=1)

    return place


def memory_node(placement: Placement) -> int | None:
    """Give the node for memory that all threads of a pool use; None: unknown, or not asked for.

    Raises:
        ConfigError: the placement cannot be on this machine.
    """
    return placement.slots(Topology.from_system(), 1)[0].node


def _pin(slot: Slot, placement: Placement) -> str | None:
    try:
        return pin(slot, placement.memory).degraded
    except (KvioError, OSError) as exc:
        return str(exc)
