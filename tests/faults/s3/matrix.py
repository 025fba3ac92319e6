"""Every fault with every operation by one library: ``python -m tests.faults.s3.matrix LIBRARY``.

Of each cell only this is asked, whatever the fault: what is said to have gone well went well, by
the bytes that were read and by what lies on the server; what did not is a typed error, with
nothing partial under the key; and a fault that passes costs nothing but a retry.

An upload in parts whose beginning was answered to nobody stays on the server, as its name is known
to nobody: rules of the bucket have to end it. Any other is given up.

Nobody can tell of two things. S3 sends no checksum with a range or a listing: a byte that changes
on its way down there is noticed in the trailer, and not in what lies before it. And of an ETag or
a checksum header that is wrong, a client may take notice or not: the bytes decide.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import kvio
from tests.faults.s3 import broken
from tests.faults.s3.proxy import FAULTS, HANGING, Fault, Proxy
from tests.faults.sizes import FULL, seed
from tests.s3 import servers
from tests.s3.failing import BUCKET, HASTY, LARGE, PREFIX, SMALL, VERBS, honoured, stored
from tests.s3.libraries import open_s3
from tests.s3.rawsig import RawS3

Verb = Callable[[kvio.Store, str], object]
ALWAYS: Final = 1_000_000
#: Besides those of the tests of failures: who writes first, and who comes late.
OPERATIONS: Final[Mapping[str, Verb]] = {
    **VERBS,
    "write what is new": lambda s, k: s.write_block(k, SMALL, if_exists="error"),
    "write keeping": lambda s, k: s.write_block(k, SMALL, if_exists="keep"),
}
#: A fault that is met once and passes: a retry must make it good ...
PASSING: Final = frozenset(
    {"500", "503 SlowDown", "reset before", "reset in the headers", "reset in the body"}
    | {"body cut off", "closed between requests", "no 100-continue", "delivered twice"}
    | {"answer lost"}
)
#: ... but where a second request would find what the first has done, and not know whose it is.
UNDECIDED: Final = "write what is new"
#: Its own timeouts end what hangs; nothing else takes so long.
PATIENT: Final = {"connect_timeout_s": 20.0, "read_timeout_s": 20.0, "request_timeout_s": 60.0}
LONG_S: Final = 10.0
#: Whether a fault passes, and how many requests of an operation go well before.
TURNS: Final = ((True, 0), (True, 1), (False, 0))
#: An upload may have begun of which the client never learnt.
UNNAMED: Final = ("reset in the headers", "answer lost", "delivered twice")
#: obstore gives up an upload while other parts are on their way, which the server then keeps.
GIVEN_UP_TOO_SOON: Final = ("s3+obstore", "body changed on the way up")


@dataclass(slots=True)
class Told:
    """What was counted, and what went against the contract."""

    cells: int = 0
    requests: int = 0
    faults: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Matrix:
    """One library at a proxy before a server."""

    def __init__(self, library: str, proxy: Proxy, raw: RawS3, told: Told) -> None:
        self._library, self._proxy, self._raw, self._told = library, proxy, raw, told
        self._number = 0

    def run(self, cells: Sequence[tuple[Fault, str]], *, once: bool, after: int) -> None:
        """Try cells one after the other, with a fault that passes or one that stays.

        *after*: so many requests of an operation go well before.
        """
        options = {**PATIENT, "retries": 3 if once else 0}
        with self._opened(options) as store:
            for fault, operation in cells:
                times = 2 if once and self._library == "s3+torch" else 1 if once else ALWAYS
                key = self._prepared(operation)
                with self._proxy.armed(fault, times, after=after):
                    outcome = attempt(store, operation, key)
                told = f"once, after {after}" if once else "always"
                self._judge(fault, operation, key, outcome, told)

    def run_hanging(self, fault: Fault, operations: Sequence[str]) -> None:
        """Try what hangs, all operations at once: each ends while its answer is withheld."""
        keys = {operation: self._prepared(operation) for operation in operations}
        with self._opened({**HASTY, "retries": 0}) as store:
            with (
                self._proxy.armed(fault, ALWAYS),
                ThreadPoolExecutor(len(keys)) as pool,
            ):
                outcomes = list(pool.map(lambda each: attempt(store, each, keys[each]), operations))
                withheld = self._proxy.hanging
            if "StorageTimeoutError" in outcomes and not withheld:
                self._told.wrong.append(f"{fault.name}: nothing was withheld any more")
            for operation, outcome in zip(operations, outcomes, strict=True):
                self._judge(fault, operation, keys[operation], outcome, "always")

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

    def _prepared(self, operation: str) -> str:
        self._number += 1
        key = f"{operation.replace(' ', '-')}/{self._number}/block"
        if not operation.startswith("write"):
            self._raw.put(BUCKET, f"{PREFIX}/{key}", stored(key, data_of(operation)))
        return key

    def _judge(self, fault: Fault, operation: str, key: str, outcome: str, how: str) -> None:
        told = self._told
        told.cells += 1
        name = f"{fault.name} | {operation} | {how}"
        told.outcomes[name] = outcome
        for complaint in self._complaints(fault, operation, key, outcome, once=how != "always"):
            told.wrong.append(f"{self._library} | {name}: {outcome}: {complaint}")

    def _complaints(
        self, fault: Fault, operation: str, key: str, outcome: str, *, once: bool
    ) -> Iterator[str]:
        if outcome == "bad" and not self._nobody_can_tell(fault, operation):
            yield "what came is not what was stored"
        if outcome.startswith("untyped"):
            yield "this is no error of kvio's"
        if operation.startswith("write"):
            yield from self._about_writes(fault, operation, key, outcome)
        passes = fault.name in PASSING and operation != UNDECIDED
        if once and passes and outcome != "good":
            yield "a retry would have made it good"
        if fault.name == "hang" and outcome != "StorageTimeoutError":
            yield "it did not end by its deadline"

    def _about_writes(self, fault: Fault, operation: str, key: str, outcome: str) -> Iterator[str]:
        found = self._raw.get(BUCKET, f"{PREFIX}/{key}")
        whole = stored(key, data_of(operation))
        if outcome == "good" and found != whole:
            yield f"a receipt, and {'nothing' if found is None else 'something else'} is there"
        changed_above = fault.name == "body changed on the way up"
        if found not in (None, whole) and not changed_above:
            yield f"{len(found or b'')} of {len(whole)} bytes are there"
        known = fault.name in UNNAMED or (self._library, fault.name) == GIVEN_UP_TOO_SOON
        if outcome == "good" and not known and self._unfinished(key):
            yield "an upload was left unfinished"

    def _unfinished(self, key: str) -> bool:
        turn, deadline = threading.Event(), time.monotonic() + LONG_S
        while left := self._raw.list_uploads(BUCKET, f"{PREFIX}/{key}"):
            if time.monotonic() > deadline:
                break
            turn.wait(0.05)
        return bool(left)

    def _nobody_can_tell(self, fault: Fault, operation: str) -> bool:
        if fault.name == "body changed on the way down":
            return operation in ("read a range", "list")
        return fault.name == "body shortened" and operation == "list"


def data_of(operation: str) -> bytes:
    """Give the bytes that an operation moves."""
    return LARGE if operation in ("write in parts", "read in parallel") else SMALL


def attempt(store: kvio.Store, operation: str, key: str) -> str:
    """Say what came of an operation: ``good``, ``bad``, or the name of the error."""
    try:
        return "good" if OPERATIONS[operation](store, key) else "bad"
    except kvio.KvioError as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001  # that is what is looked for
        return f"untyped {type(error).__name__}"


def concerns(fault: Fault, operation: str) -> bool:
    """Tell whether an operation makes requests that a fault goes wrong with."""
    if fault.methods == {"PUT"}:
        return operation.startswith("write")
    return not fault.methods or operation != "delete"


def run(
    library: str,
    server: str,
    pace: str,
    *,
    turns: Sequence[tuple[bool, int]] = TURNS,
    mutant: str = "",
) -> dict[str, Any]:
    """Fill the matrix of a library, all of it or a sample, at a server of that name.

    *pace*: ``patient`` for what answers, ``hasty`` for what hangs. One library takes its timeouts
    from the first store of a process. *turns*: whether a fault passes, and after how many requests.
    """
    told, dice = Told(), random.Random(f"{seed()} {library} {server}")
    cells = [
        (fault, operation)
        for fault in FAULTS
        for operation in OPERATIONS
        if fault.name not in HANGING and concerns(fault, operation)
    ]
    hanging = [fault for fault in FAULTS if fault.name in HANGING]
    with (
        servers.serving(server) as endpoint,
        Proxy(endpoint) as proxy,
        broken.backend(library, mutant),
    ):
        raw = RawS3(endpoint)
        raw.create_bucket(BUCKET)
        matrix = Matrix(library, proxy, raw, told)
        if pace == "patient":
            for once, after in turns:
                matrix.run(cells if FULL else sampled(cells, dice), once=once, after=after)
        else:
            for fault in hanging if FULL else [dice.choice(hanging)]:
                matrix.run_hanging(fault, list(OPERATIONS))
        told.requests, told.faults = proxy.requests, proxy.injected
    return {name: getattr(told, name) for name in Told.__slots__}


def sampled(cells: Sequence[tuple[Fault, str]], dice: random.Random) -> list[tuple[Fault, str]]:
    """Take two operations of each fault, but few of those that move megabytes."""
    found = []
    for name in dict.fromkeys(fault.name for fault, _ in cells):
        own = [cell for cell in cells if cell[0].name == name]
        light = [cell for cell in own if data_of(cell[1]) is SMALL]
        found += [dice.choice(light), dice.choice(own if dice.randrange(4) == 0 else light)]
    return found


if __name__ == "__main__":
    os.environ.setdefault("KVIO_TEST_ALONE", "1")
    print(json.dumps(run(*sys.argv[1:4])))
