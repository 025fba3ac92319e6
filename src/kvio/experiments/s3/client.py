"""One load in a process of its own: ``python -m kvio.experiments.s3.client``, an order on stdin.

After the order it connects, makes some small calls so that every connection is open, some of each
operation, and says ``ready`` before each; the next line on stdin starts the clock. What it read is
compared when the clock has stopped.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Final

from kvio import CorruptBlockError
from kvio.experiments.s3.libraries import Caller, connect
from kvio.experiments.s3.order import (
    FOLDER_OBJECTS,
    GET,
    HEAD,
    LIST,
    PUT,
    RANGE,
    Order,
    Window,
)

_WARM_UP: Final = b"warm" * 64
#: At least, before each operation: a function's first calls take several times the others' time.
_WARM_CALLS: Final = 16


def main() -> int:
    """Run the order on stdin, and answer on what was stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    order = Order.of(sys.stdin.readline())
    try:
        load = _Load(order, connect(order))
        load.warm_up()
        for operation in order.operations:
            load.prepare(operation)
            _tell(answers, "ready\n")
            if not sys.stdin.readline():
                return 1  # whoever began it is gone
            _tell(answers, load.run(operation).line())
    except Exception as exc:  # noqa: BLE001  # five libraries, and the parent is to hear of it
        said = {"error": f"{type(exc).__name__}: {exc}"}
        _tell(answers, json.dumps(said) + "\n")
        os._exit(1)
    # Runtimes of native libraries are not waited for: they have nothing left to do.
    os._exit(0)


def _tell(answers: IO[str], line: str) -> None:
    answers.write(line)
    answers.flush()


class _Load:
    """Calls by threads, and what they gave."""

    def __init__(self, order: Order, caller: Caller) -> None:
        self._order = order
        self._caller = caller
        with open(order.payload, "rb") as file:
            self._payloads = [file.read(order.nbytes) for _ in range(order.distinct)]
        self._stored = 0
        self._outs: list[bytearray] = []
        self._keys: list[str] = []

    def warm_up(self) -> None:
        """Open a connection a thread, and let the interpreter see the calls it will make."""

        def put(index: int) -> None:
            self._caller.put(f"{self._order.prefix}-warm/{index:04d}", _WARM_UP)

        self._warm(put, max(self._order.threads, _WARM_CALLS))

    def _warm(self, call: Callable[[int], object], count: int) -> None:
        threads = self._order.threads

        def some(first: int) -> None:
            for index in range(first, count, threads):
                with suppress(CorruptBlockError):  # it will be told when it counts
                    call(index)

        _start([partial(some, first) for first in range(threads)])()

    def prepare(self, operation: str) -> None:
        """Have keys, memory and whatever the contender makes ahead."""
        order = self._order
        if operation == PUT:
            self._keys = [order.key(index) for index in range(order.count)]
        elif operation == LIST:
            self._keys = [order.folder] * max(order.threads, self._stored // 20)
        else:
            self._keys = [order.key(index) for index in range(self._stored)]
        if operation in (GET, RANGE):
            nbytes = order.nbytes if operation == GET else order.extent[1]
            self._outs = [bytearray(b"\xa5" * nbytes) for _ in self._keys]
        self._caller.prepare(operation, list(dict.fromkeys(self._keys)))
        if operation != PUT:
            self._warm_reads(operation)

    def _warm_reads(self, operation: str) -> None:
        count = min(len(self._keys), max(self._order.threads, _WARM_CALLS))
        self._warm(self._call(operation), count)
        for out in self._outs[:count]:
            out[:] = b"\xa5" * len(out)

    def run(self, operation: str) -> Window:
        """Make the calls; the clock runs from here to the end of the last."""
        call, numbers = self._call(operation), itertools.count()
        times: list[float] = []
        answers: dict[int, int | str] = {}
        gate = threading.Event()

        def work() -> None:
            gate.wait()
            while (index := next(numbers)) < len(self._keys):
                begun = time.monotonic()
                if begun - started > self._order.limit_s:
                    return
                try:
                    answers[index] = call(index)
                except CorruptBlockError as exc:
                    answers[index] = str(exc)
                times.append(time.monotonic() - begun)

        join = _start([work] * self._order.threads)
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        gate.set()
        join()
        ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        if operation == PUT:
            self._stored = len(answers)
        wrong = self._wrong(operation, answers)
        return Window(
            operation=operation,
            start_s=started,
            end_s=ended,
            latencies_s=times,
            user_s=after.ru_utime - before.ru_utime,
            system_s=after.ru_stime - before.ru_stime,
            intact=None if operation == PUT else not wrong,
            wrong=wrong,
        )

    def _call(self, operation: str) -> Callable[[int], int]:
        caller, keys, outs, payloads = self._caller, self._keys, self._outs, self._payloads
        start = self._order.extent[0]

        def put(index: int) -> int:
            caller.put(keys[index], payloads[index % len(payloads)])
            return 0

        calls: dict[str, Callable[[int], int]] = {
            PUT: put,
            GET: lambda index: caller.get(keys[index], outs[index]),
            RANGE: lambda index: caller.get_range(keys[index], outs[index], start),
            HEAD: lambda index: caller.head(keys[index]),
            LIST: lambda index: caller.names(keys[index]),
        }
        return calls[operation]

    def _wrong(self, operation: str, answers: dict[int, int | str]) -> str:
        """Say what of the answers is not as it was stored."""
        start, length = self._order.extent
        for index, answer in answers.items():
            payload = self._payloads[index % len(self._payloads)]
            if isinstance(answer, str):
                return answer
            if operation in (HEAD, LIST):
                names = min(self._stored, FOLDER_OBJECTS)
                expected = self._order.nbytes if operation == HEAD else names
                if answer != expected:
                    return f"{operation}: {answer} instead of {expected}"
            elif operation in (GET, RANGE):
                wanted = payload if operation == GET else payload[start : start + length]
                if answer != len(wanted) or self._outs[index] != wanted:
                    return f"{self._order.key(index)}: other bytes than were stored"
        return ""


def _start(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Begin each call in a thread; what is returned waits for all and raises the first failure."""
    failures: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as exc:  # noqa: BLE001  # it is raised by whoever waits
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()

    def join() -> None:
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    return join


if __name__ == "__main__":
    sys.exit(main())
