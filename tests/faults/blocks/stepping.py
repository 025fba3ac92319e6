"""A process that stops its file system before each call that changes it, one by one, and checks.

    python -m tests.faults.blocks.stepping DIRECTORY KIND WAY...

With the library of stepper.c preloaded. Writes one line of JSON: verdicts, and the steps of each
way. What a random stop seldom meets is met here: the moment between a name and its sync.
"""

from __future__ import annotations

import ctypes
import json
import sys
from functools import partial
from typing import Final

import kvio
from tests.faults.blocks import kernel
from tests.faults.blocks.cycles import WAYS, Cycle, Cycles
from tests.faults.blocks.stopping import seal
from tests.faults.blocks.workload import ROOT, content, names

_library = ctypes.CDLL(None)
#: More steps than any body has.
_TOO_MANY: Final = 500


def _write_blocks(number: int, cycle: Cycle) -> None:
    """Write, replace, keep, delete, write a batch; the stop comes before one of their calls."""
    first, second, third, *others = names(6)
    with cycle.scenario.open(cycle.mountpoint, "durable") as store:
        _library.kvio_stop_before(number)
        for key in (first, second):
            cycle.attempt(key, 0, partial(store.write_block, key, content(key, 0)))
        replaced = partial(store.write_block, first, content(first, 1), if_exists="replace")
        cycle.attempt(first, 1, replaced)
        cycle.attempt(second, 0, partial(store.write_block, second, content(second, 0)))
        cycle.attempt(second, None, partial(store.delete_block, second))
        cycle.attempt(third, 0, partial(store.write_block, third, content(third, 0)))
        items = [(key, content(key, 0)) for key in others]
        cycle.attempt_all(others, partial(store.write_blocks, items))
        if cycle.is_down():
            _ask(cycle, store, first)


def _ask(cycle: Cycle, store: kvio.Store, key: str) -> None:
    """Call what does not write, with the file system down."""
    cycle.ask("read_block", partial(store.read_block, key))
    cycle.ask("stat_block", partial(store.stat_block, key))
    cycle.ask("verify_block", partial(store.verify_block, key))
    cycle.ask("contains", partial(store.contains, key))
    cycle.ask("count_leading", partial(store.count_leading, [key]))
    cycle.ask("list_keys", lambda: list(store.list_keys()))
    cycle.ask("sweep", store.sweep)
    cycle.ask("flush", store.flush)
    cycle.ask("open_store", lambda: cycle.scenario.open(cycle.mountpoint, "durable").close())


def _write_shared(number: int, cycle: Cycle) -> None:
    """Make, write and seal two files, the second in the place of the first."""
    _library.kvio_stop_before(number)
    path = f"{cycle.mountpoint}/{ROOT}/shared0"
    for version in range(3):
        cycle.attempt("shared0", version, partial(seal, path, content("shared0", version)))


def _run(number: int, cycle: Cycle) -> None:
    body = _write_shared if cycle.scenario.shared else _write_blocks
    body(number, cycle)
    _library.kvio_stop_before(0)


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    work, kind, *ways = arguments
    kernel.own_namespace()
    kernel.mount("none", work, "tmpfs", "size=1g,mode=700")
    steps = dict.fromkeys(ways, 0)
    with Cycles(kind, work) as cycles:
        for way in ways:
            for number in range(1, _TOO_MANY):
                cycle = Cycle(cycles.root, WAYS[way], _stopped, _nothing)
                cycles.run(cycle, partial(_run, number), f"{kind} {way} before call {number}")
                if not _stopped():
                    break
                steps[way] = number
    print(json.dumps({**cycles.verdicts.as_json(), "steps": steps}), flush=True)


def _stopped() -> bool:
    return bool(_library.kvio_stopped())


def _nothing() -> None:
    """Nobody waits for a number of operations."""


if __name__ == "__main__":
    main(sys.argv[1:])
