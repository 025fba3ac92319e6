"""Every fault with every operation by one library: ``python -m tests.faults.s3.matrix LIBRARY``.

Of each cell only this is asked, whatever the fault: what is said to have gone well went well, by
the bytes that were read and by what lies on the server; what did not is a typed error, with
nothing partial under the key and no upload left that somebody knows of; a fault that passes costs
nothing but a retry; and what hangs ends in time. What nobody can tell stands in `judging`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import kvio
from tests.faults.s3 import broken, skewed
from tests.faults.s3.faults import FAULTS, HANGING, Fault
from tests.faults.s3.judging import DENIED, Cell, Told
from tests.faults.s3.operations import (
    OPERATIONS,
    UNDECIDED,
    Outcomes,
    folder_of,
    keys_of,
    prepare,
)
from tests.faults.s3.proxy import Proxy
from tests.faults.sizes import FULL, seed
from tests.s3 import servers
from tests.s3.failing import BUCKET, HASTY, PATIENT, PREFIX, SMALL, honoured
from tests.s3.libraries import open_s3
from tests.s3.rawsig import RawS3

ALWAYS: Final = 1_000_000
LONG_S: Final = 10.0
PATIENCE: Final = 20
#: Where what hung is asked for again, that has the time it needs on a busy machine.
UNHURRIED: Final = {name: 4 * limit for name, limit in HASTY.items()}
#: All stores of a process have the same timeouts.
CONFIGURED_ONCE: Final = ("s3+s3dlio",)
#: Whether a fault passes, and how many requests of an operation go well before.
TURNS: Final = ((True, 0), (True, 1), (False, 0), (False, 1))
#: Cells of a slice, of the turn that is long with all of them.
LATE: Final = (("reset in the body", "list pages"), ("500", "write in parts"))
#: Once it was refused, it goes by the server's clock.
LEARNS_THE_TIME: Final = ("s3+s3dlio",)


class Matrix:
    """One library at a proxy before a server."""

    def __init__(self, library: str, proxy: Proxy, raw: RawS3, reported: Told) -> None:
        self._library, self._proxy, self._raw, self._reported = library, proxy, raw, reported
        self._number = 0

    def run(self, cells: Sequence[tuple[Fault, str]], *, once: bool, after: int) -> None:
        """Try cells one after the other, with a fault that passes or one that stays.

        *after*: so many requests of an operation go well before.
        """
        how = f"{'once' if once else 'always'}, after {after}"
        with self._opened({**PATIENT, "retries": 3 if once else 0}) as store:
            for fault, operation in cells:
                times = 2 if once and self._library == "s3+torch" else 1 if once else ALWAYS
                folder, keys = self._prepared(operation)
                word = f"{PREFIX}/{folder}/"
                with self._proxy.armed(fault, times, about=[word], after=after) as met:
                    outcomes = OPERATIONS[operation].does(store, keys)
                for key in keys:
                    self._judge(fault, operation, key, how, outcomes, met[word])

    def run_hanging(self, fault: Fault, operations: Sequence[str], *, once: bool) -> None:
        """Try what hangs, all operations at once: each ends while its answer is withheld.

        With a fault that passes each is then asked for *once* more, by the client that timed out:
        that comes to the same end, whether or not the first had been carried out.
        """
        cells = {operation: self._prepared(operation) for operation in operations}
        words = [f"{PREFIX}/{folder}/" for folder, _ in cells.values()]
        hurried = not once or self._library in CONFIGURED_ONCE
        pace = HASTY if hurried else UNHURRIED
        with self._opened({**pace, "retries": 3 if once else 0}) as store:
            with self._proxy.armed(fault, 1 if once else ALWAYS, about=words) as met:
                found = _side_by_side(store, cells)
                withheld = self._proxy.hanging
            timeouts = [o for outcomes, _ in found for o in outcomes.values()]
            if "StorageTimeoutError" in timeouts and not withheld:
                self._reported.wrong.append(f"{fault.name}: nothing was withheld any more")
            how = "once" if once else "always"
            limit_s = pace["request_timeout_s"] * (4 if once else 1)
            for (operation, (_, keys)), word, (outcomes, took_s) in zip(
                cells.items(), words, found, strict=True
            ):
                for key in keys:
                    timing = {"limit_s": limit_s, "took_s": took_s}
                    self._judge(fault, operation, key, how, outcomes, met[word], **timing)
            if once:
                self._ask_again(store, fault, cells, met)

    def _ask_again(
        self,
        store: kvio.Store,
        fault: Fault,
        cells: Mapping[str, tuple[str, Sequence[str]]],
        met: Mapping[str, Sequence[str]],
    ) -> None:
        for operation, (folder, keys) in cells.items():
            # What was carried out is now said to be: what was new is there, or it is gone.
            done = "bad" if OPERATIONS[operation].deletes else "BlockExistsError"
            carried_out = OPERATIONS[operation].deletes or operation == UNDECIDED
            for _ in range(PATIENCE):  # hasty timeouts, on a machine that may be busy
                reported = OPERATIONS[operation].does(store, keys)
                if "StorageTimeoutError" not in reported.values():
                    break
            for key in keys:
                calm = "good" if carried_out and reported[key] == done else reported[key]
                met_here = met[f"{PREFIX}/{folder}/"]
                self._judge(fault, operation, key, "again", {key: calm}, met_here)
                if calm != "good":
                    self._reported.wrong.append(f"{fault.name} | {operation} | again: {calm}")

    def run_skewed(self, clock: skewed.Clock, operations: Sequence[str]) -> None:
        """Try operations while the clocks differ: one error, no retry, and nothing is stored."""
        fault, reported = Fault("clock skew", before=True), self._reported
        with self._opened({**PATIENT, "retries": 3}) as store:
            for operation in operations:
                _, keys = self._prepared(operation)
                with clock.wrong():
                    outcomes = OPERATIONS[operation].does(store, keys)
                for key in keys:
                    self._judge(fault, operation, key, "really", outcomes, ())
                    learnt = reported.met[fault.name] and self._library in LEARNS_THE_TIME
                    reported.met[fault.name] += outcomes[key] == DENIED
                    if outcomes[key] != DENIED and not learnt:
                        reported.wrong.append(f"clock skew | {operation}: {outcomes[key]}")
            if again := store.stats().retries:
                reported.wrong.append(f"clock skew: {again} requests were made again")

    @contextlib.contextmanager
    def _opened(self, options: Mapping[str, Any]) -> Iterator[kvio.Store]:
        settings = {"part_bytes": 5 << 20, "conditional": "trust", "durability": "durable"}
        store = open_s3(
            self._library,
            self._proxy.endpoint,
            BUCKET,
            prefix=PREFIX,
            options=honoured(self._library, {**settings, **options}),
        )
        yield store
        store.close(timeout=LONG_S)

    def _prepared(self, operation: str) -> tuple[str, list[str]]:
        self._number += 1
        folder = folder_of(operation, self._number)
        keys = keys_of(operation, folder)
        prepare(self._raw, operation, keys)
        return folder, keys

    def _judge(
        self,
        fault: Fault,
        operation: str,
        key: str,
        how: str,
        outcomes: Outcomes,
        met: Sequence[str],
        **timing: float,
    ) -> None:
        server = self._raw.endpoint.name
        cell = Cell(
            self._library, server, fault, operation, key, how, outcomes[key], tuple(met), **timing
        )
        self._reported.judge(cell, self._raw)


def _side_by_side(
    store: kvio.Store, cells: Mapping[str, tuple[str, Sequence[str]]]
) -> list[tuple[Outcomes, float]]:
    """Ask for all operations at once; of each, what came of it and how long that took."""

    def ask(operation: str) -> tuple[Outcomes, float]:
        began = time.monotonic()
        outcomes = OPERATIONS[operation].does(store, cells[operation][1])
        return outcomes, time.monotonic() - began

    with ThreadPoolExecutor(len(cells)) as pool:
        return list(pool.map(ask, cells))


def concerns(fault: Fault, operation: str) -> bool:
    """Return whether an operation makes requests that a fault goes wrong with."""
    what = OPERATIONS[operation]
    if fault.methods == {"PUT"}:
        return what.writes
    return not fault.methods or not what.deletes


def run(
    library: str,
    server: str,
    pace: str,
    *,
    turns: Sequence[tuple[bool, int]] = TURNS,
    mutant: str = "",
) -> dict[str, Any]:
    """Fill the matrix of a library, all of it or a sample, at a server of that name.

    *pace*: ``patient`` for what answers, ``hasty`` for what hangs, ``skewed`` for clocks that
    differ. One library takes its timeouts from the first store of a process. *turns*: whether a
    fault passes, and after how many requests.
    """
    reported, dice = Told(), random.Random(f"{seed()} {library} {server}")
    with contextlib.ExitStack() as stack:
        if pace == "skewed":
            endpoint, clock = stack.enter_context(skewed.serving())
        else:
            endpoint, clock = stack.enter_context(servers.serving(server)), None
        proxy = stack.enter_context(Proxy(endpoint))
        stack.enter_context(broken.backend(library, mutant))
        raw = RawS3(endpoint)
        raw.create_bucket(BUCKET)
        matrix = Matrix(library, proxy, raw, reported)
        operations = [name for name in OPERATIONS if FULL or name != "list pages"]
        if clock is not None:
            matrix.run_skewed(clock, operations)
        elif pace == "patient":
            for once, after in turns:
                matrix.run(cells_of((once, after), dice), once=once, after=after)
        else:
            hanging = [(fault, once) for fault in FAULTS for once in (False, True)]
            hanging = [one for one in hanging if one[0].name in HANGING]
            for fault, once in hanging if FULL else [dice.choice(hanging)]:
                concerned = [name for name in operations if concerns(fault, name)]
                matrix.run_hanging(fault, concerned, once=once)
        reported.requests = proxy.requests
        reported.met.update(proxy.met)
        if proxy.expecting:
            reported.wrong.append(f"{proxy.expecting} requests waited for 100 Continue")
    return reported.plain()


def cells_of(turn: tuple[bool, int], dice: random.Random) -> list[tuple[Fault, str]]:
    """List the cells of a turn: in all of the campaign each that says something new.

    A fault that stays, after something went well, is for operations of several requests; of the
    listing in pages only what comes after the first is new.
    """
    once, after = turn
    cells = [
        (fault, name)
        for fault in FAULTS
        for name, what in OPERATIONS.items()
        if fault.name not in HANGING
        and concerns(fault, name)
        and (what.usual or turn == TURNS[0])
        and (what.several or not after or once)
        and (after or name != "list pages")
    ]
    if FULL:
        return cells
    if not once and after:
        return [cell for cell in cells if (cell[0].name, cell[1]) in LATE]
    return sampled(cells, dice)


def sampled(cells: Sequence[tuple[Fault, str]], dice: random.Random) -> list[tuple[Fault, str]]:
    """Take two operations of each fault, but few of those that move megabytes."""
    found = []
    for name in dict.fromkeys(fault.name for fault, _ in cells):
        own = [one for one in cells if one[0].name == name and one[1] != "list pages"]
        light = [cell for cell in own if OPERATIONS[cell[1]].data is SMALL]
        found += [dice.choice(light), dice.choice(own if dice.randrange(4) == 0 else light)]
    return found


if __name__ == "__main__":
    os.environ.setdefault("KVIO_TEST_ALONE", "1")
    print(json.dumps(run(*sys.argv[1:4])))
