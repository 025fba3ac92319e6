"""Slots for the threads of a pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress

from kvio.errors import KvioError
from kvio.placement.applying import applied, pin
from kvio.placement.slots import Placement, Slot
from kvio.placement.topology import Topology


def thread_placer(placement: Placement, threads: int) -> Callable[[int], None]:
    """Return a function that each thread of a pool calls first, with its number, to set its slot.

    The slots are decided here, once, and tried on the calling thread, which is put back; threads
    beyond *threads* begin again with the first. What the machine withholds is done without and
    warned of: a pool goes on wherever its threads run.

    Raises:
        ConfigError: the placement cannot be on this machine.
    """
    slots = placement.slots(Topology.from_system(), threads)
    withheld = {_try(slot, placement) for slot in slots} - {None}
    for said in sorted(filter(None, withheld)):
        warnings.warn(f"threads are not placed as asked: {said}", stacklevel=2)

    def place(number: int) -> None:
        with suppress(KvioError, OSError):  # it was warned of; the thread runs where it is
            pin(slots[number % len(slots)], placement.memory)

    return place


def memory_node(placement: Placement) -> int | None:
    """Return the node for memory that all threads of a pool use; None: unknown, or not wanted.

    Raises:
        ConfigError: the placement cannot be on this machine.
    """
    return placement.slots(Topology.from_system(), 1)[0].node


def _try(slot: Slot, placement: Placement) -> str | None:
    try:
        with applied(slot, placement.memory) as outcome:
            return outcome.degraded
    except (KvioError, OSError) as exc:
        return str(exc)
