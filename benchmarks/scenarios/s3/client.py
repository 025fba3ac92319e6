"""One load in a process of its own: what a worker does when it is asked.

``start`` connects and opens every connection. ``prepare`` makes some calls of an operation before
``run`` starts its clock. What was read is compared when the clock has stopped.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Final

from benchmarks.harness.workers import Answer, Local
from benchmarks.scenarios.s3.libraries import (
    FOLDER_OBJECTS,
    GET,
    HEAD,
    LIST,
    PUT,
    RANGE,
    Caller,
    JobSpec,
    connect,
)
from kvio import CorruptBlockError

_WARM_UP: Final = b"warm" * 64
#: At least, before each operation: the first calls of a function take several times as long.
_WARM_CALLS: Final = 16


def _answering(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Answer with the error where a library raises one; each has exceptions of its own."""

    @wraps(method)
    def answer(*arguments: Any, **named: Any) -> Answer:
        try:
            return method(*arguments, **named)
        except Exception as exc:  # noqa: BLE001  # five libraries
            return {"error": f"{type(exc).__name__}: {exc}"}

    return answer


class Client:
    """Calls by threads, and what they returned."""

    def __init__(self) -> None:
        self._stored = 0
        self._outs: list[bytearray] = []
        self._keys: list[str] = []

    @_answering
    def start(self, *, spec: Mapping[str, Any], environ: Mapping[str, str]) -> Answer:
        """Connect with the credentials of *environ*, one connection a thread."""
        os.environ.pop("AWS_SESSION_TOKEN", None)  # of other credentials
        os.environ.update(environ)
        self._spec = JobSpec.of(spec)
        self._caller: Caller = connect(self._spec)
        with open(self._spec.payload, "rb") as file:
            self._payloads = [file.read(self._spec.nbytes) for _ in range(self._spec.distinct)]

        def put(index: int) -> None:
            self._caller.put(f"{self._spec.prefix}-warm/{index:04d}", _WARM_UP)

        self._warm(put, max(self._spec.threads, _WARM_CALLS))
        return {}

    @_answering
    def prepare(self, *, operation: str) -> Answer:
        """Make keys, memory and what the contender needs before the clock starts."""
        spec = self._spec
        if operation == PUT:
            self._keys = [spec.key(index) for index in range(spec.count)]
        elif operation == LIST:
            self._keys = [spec.folder] * max(spec.threads, self._stored // 20)
        else:
            self._keys = [spec.key(index) for index in range(self._stored)]
        if operation in (GET, RANGE):
            nbytes = spec.nbytes if operation == GET else spec.extent[1]
            self._outs = [bytearray(b"\xa5" * nbytes) for _ in self._keys]
        self._caller.prepare(operation, list(dict.fromkeys(self._keys)))
        if operation != PUT:
            count = min(len(self._keys), max(spec.threads, _WARM_CALLS))
            self._warm(self._call(operation), count)
            for out in self._outs[:count]:
                out[:] = b"\xa5" * len(out)
        return {}

    @_answering
    def run(self, *, operation: str) -> Answer:
        """Make the calls; the clock runs from here to the end of the last.

        Returns:
            Start and end by the monotonic clock of the machine, the time of every call, processor
            seconds, and what was wrong in a few words.
        """
        call, numbers = self._call(operation), itertools.count()
        times: list[float] = []
        answers: dict[int, int | str] = {}
        gate = threading.Event()

        def work() -> None:
            gate.wait()
            while (index := next(numbers)) < len(self._keys):
                begun = time.monotonic()
                if begun - started > self._spec.limit_s:
                    return
                try:
                    answers[index] = call(index)
                except CorruptBlockError as exc:
                    answers[index] = str(exc)
                times.append(time.monotonic() - begun)

        join = _start([work] * self._spec.threads)
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        gate.set()
        join()
        ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        if operation == PUT:
            self._stored = len(answers)
        return {
            "start_s": started,
            "end_s": ended,
            "latencies_s": times,
            "user_s": after.ru_utime - before.ru_utime,
            "system_s": after.ru_stime - before.ru_stime,
            "wrong": self._wrong(operation, answers),
        }

    def end(self) -> Answer:
        """Report the processor seconds of the whole process: interpreter and imports, too."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu_s": usage.ru_utime + usage.ru_stime}

    def close(self) -> Answer:
        """Do nothing: the process is killed, since native runtimes would take long to end."""
        return {}

    def _warm(self, call: Callable[[int], object], count: int) -> None:
        threads = self._spec.threads

        def some(first: int) -> None:
            for index in range(first, count, threads):
                with suppress(CorruptBlockError):  # it is reported when it counts
                    call(index)

        _start([partial(some, first) for first in range(threads)])()

    def _call(self, operation: str) -> Callable[[int], int]:
        caller, keys, outs, payloads = self._caller, self._keys, self._outs, self._payloads
        start = self._spec.extent[0]

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

    def _wrong(self, operation: str, answers: Mapping[int, int | str]) -> str:
        """Return which answer is not as it was stored; empty: none."""
        start, length = self._spec.extent
        for index, answer in answers.items():
            payload = self._payloads[index % len(self._payloads)]
            if isinstance(answer, str):
                return answer
            if operation in (HEAD, LIST):
                names = min(self._stored, FOLDER_OBJECTS)
                expected = self._spec.nbytes if operation == HEAD else names
                if answer != expected:
                    return f"{operation}: {answer} instead of {expected}"
            elif operation in (GET, RANGE):
                wanted = payload if operation == GET else payload[start : start + length]
                if answer != len(wanted) or self._outs[index] != wanted:
                    return f"{self._spec.key(index)}: other bytes than were stored"
        return ""


class Relay:
    """Passes commands on to a client in a fresh process: what a rank of an MPI job does."""

    def __init__(self) -> None:
        self._client: Local | None = None
        self._started = 0.0

    def start(self, **arguments: Any) -> Answer:
        """Start the process of a load; that of the load before is no longer needed."""
        self.close()
        self._started = time.monotonic()
        self._client = Local(Client, 0)
        return self._ask(do="start", **arguments)

    def prepare(self, **arguments: Any) -> Answer:
        """See `Client.prepare`."""
        return self._ask(do="prepare", **arguments)

    def run(self, **arguments: Any) -> Answer:
        """See `Client.run`."""
        return self._ask(do="run", **arguments)

    def end(self) -> Answer:
        """See `Client.end`; the time since the process was started is added."""
        answer = {**self._ask(do="end"), "wall_s": time.monotonic() - self._started}
        self.close()
        return answer

    def close(self) -> Answer:
        """End the process."""
        if self._client is not None:
            self._client.kill()
            self._client = None
        return {}

    def _ask(self, **command: Any) -> Answer:
        assert self._client is not None, "start comes first"
        self._client.send(command)
        return self._client.receive()


def _start(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Start each call in a thread; what is returned waits for all and raises the first failure."""
    failures: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as exc:  # noqa: BLE001  # it is raised by join
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
