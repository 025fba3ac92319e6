"""Threads of an executor that are kept busy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kvio.core.executor import Executor, Job

LONG_S = 60.0


def queue(
    executor: Executor,
    run: Callable[[], Any],
    *,
    nbytes: int,
    read: bool,
    deadline: float | None = None,
) -> Job:
    """Submit a job."""
    job = Job(run, nbytes=nbytes, read=read)
    executor.submit(job, deadline=deadline)
    return job


def occupy(executor: Executor, gate: threading.Event, nbytes: int = 0) -> Job:
    """Put one thread of the executor into a call that returns when the gate opens."""
    entered = threading.Event()

    def wait() -> str:
        entered.set()
        assert gate.wait(LONG_S)
        return "late"

    job = queue(executor, wait, nbytes=nbytes, read=False)
    assert entered.wait(LONG_S)
    return job


def put(executor: Executor, order: list[str], name: str, *, read: bool, nbytes: int = 0) -> Job:
    """Queue a job that notes its name."""
    return queue(executor, partial(order.append, name), nbytes=nbytes, read=read)
