"""The threads of a handle, with a bound on queued bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from kvio.buffers import Data, as_parts, total_bytes
from kvio.executor import Executor, Job
from kvio.sharedfile.writing import Writer
from kvio.types import MiB

_QUEUED_BYTES: Final = 256 * MiB


class Submitter:
    """Threads of one handle, started when first needed."""

    def __init__(self, threads: int, on_start: Callable[[int], None] | None, path: str) -> None:
        self._threads = threads
        self._path = path
        self._on_start = on_start
        self._lock = threading.Lock()
        self._executor: Executor | None = None

    def submit(self, writer: Writer, data: Data, offset: int) -> Future[int]:
        """Queue a write; waits while more than 256 MiB are queued."""
        nbytes = total_bytes(as_parts(data))
        job = Job(lambda: writer.pwrite(data, offset), nbytes=nbytes, read=False)
        self._started().submit(job)
        return job.future

    def run_all(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run tasks on these threads and the caller's; see `Executor.run_all`."""
        return self._started().run_all(tasks)

    def _started(self) -> Executor:
        with self._lock:
            if self._executor is None:
                self._executor = Executor(
                    threads=self._threads,
                    max_queued_bytes=_QUEUED_BYTES,
                    on_start=self._on_start,
                    name=f"shared file {self._path!r}",
                )
            return self._executor

    def drain(self) -> None:
        """Wait until no write is queued or running."""
        if self._executor is not None:
            self._executor.drain()

    def cancel(self) -> None:
        """Cancel queued writes and wait for running ones."""
        if self._executor is not None:
            self._executor.close(timeout=0.0)

    def close(self) -> None:
        """Finish queued writes and end the threads."""
        if self._executor is not None:
            self._executor.close()
