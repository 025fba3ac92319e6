"""Writers of one process at work: all begin at one moment, each on its own CPUs."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Sequence

from kvio.experiments.sharedfile.order import Window


def pin(cpus: Sequence[int] | None) -> None:
    """Keep the calling thread, and what it begins, on these CPUs."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def wait_until(at_s: float) -> None:
    """Sleep until a moment of the monotonic clock."""
    if (pause_s := at_s - time.monotonic()) > 0:
        time.sleep(pause_s)


def run(
    writers: Sequence[Callable[[], list[float]]],
    cpus: Sequence[Sequence[int] | None],
    sync: Callable[[], object],
    at_s: float,
) -> Window:
    """Let each writer do all its calls from *at_s* on, a thread each where there are several.

    Args:
        writers: each gives how long its calls took.
        cpus: of each.
        sync: called once, when all have ended.
        at_s: by the monotonic clock.
    """
    work = [_Work(*one) for one in zip(writers, cpus, strict=True)]
    if len(work) == 1:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        work[0].run(at_s)
    else:
        threads = [threading.Thread(target=one.run, args=(at_s,)) for one in work]
        for thread in threads:
            thread.start()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        for thread in threads:
            thread.join()
    for one in work:
        if one.failure is not None:
            raise one.failure
    sync()
    synced_s, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    return Window(
        started_s=[one.started_s for one in work],
        ended_s=[one.ended_s for one in work],
        synced_s=synced_s,
        latencies_s=[seconds for one in work for seconds in one.latencies_s],
        user_s=after.ru_utime - usage.ru_utime,
        system_s=after.ru_stime - usage.ru_stime,
    )


class _Work:
    """One writer and what it took."""

    def __init__(self, call: Callable[[], list[float]], cpus: Sequence[int] | None) -> None:
        self._call, self._cpus = call, cpus
        self.started_s = self.ended_s = 0.0
        self.latencies_s: list[float] = []
        self.failure: Exception | None = None

    def run(self, at_s: float) -> None:
        try:
            pin(self._cpus)
            wait_until(at_s)
            self.started_s = time.monotonic()
            self.latencies_s = self._call()
            self.ended_s = time.monotonic()
        except Exception as exc:  # noqa: BLE001  # run() raises it
            self.failure = exc
