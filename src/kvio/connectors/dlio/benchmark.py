"""Wrap DLIO's benchmark: fill in options, stop all ranks on an error, check the block counts."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dlio_benchmark.utils.utility import DLIOMPI

from kvio.connectors.dlio import counts
from kvio.connectors.dlio.checking import check_counts, check_options, report
from kvio.connectors.dlio.defaults import filled_in, goes_through_kvio
from kvio.connectors.dlio.versions import Release


def watched(original: Any, release: Release) -> Any:
    """Return a subclass of DLIO's benchmark that fails unless every block went through kvio."""

    class KvioBenchmark(original):  # type: ignore[misc]  # DLIO has no types
        def __init__(self, workload: Any) -> None:
            self._kvio = goes_through_kvio(workload)
            _exit_at_sigterm()
            with _stopping_all_ranks():
                if self._kvio:
                    counts.begin()
                elif DLIOMPI.get_instance().rank() == 0:
                    _warn(workload)
                super().__init__(filled_in(workload) if self._kvio else workload)

        def initialize(self) -> None:
            with _stopping_all_ranks():
                super().initialize()
                if self._kvio:
                    check_options(self.args)

        def run(self) -> None:
            with _stopping_all_ranks():
                super().run()

        def finalize(self) -> None:
            with _stopping_all_ranks():
                super().finalize()
                if self._kvio:
                    self._check()

        def _check(self) -> None:
            found = self.comm.allgather(counts.total())
            if self.args.my_rank == 0:
                report(found)
            check_counts(self.args, found, release)

    KvioBenchmark.__name__ = KvioBenchmark.__qualname__ = original.__name__
    return KvioBenchmark


def _warn(workload: Any) -> None:
    kind = (workload.get("storage") or {}).get("storage_type", "local_fs")
    sys.stderr.write(
        f"[KVIO] warning: kvio is configured, but storage_type is {kind}: nothing goes through "
        "kvio; add ++workload.storage.storage_type=parallel_fs\n"
    )


def _exit_at_sigterm() -> None:
    """Let SIGTERM end the run like Ctrl-C: remove directories and stop the other ranks."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def _stopping_all_ranks() -> Iterator[None]:
    """Abort all ranks if one fails; the others would wait for it in a barrier for ever."""
    try:
        yield
    except BaseException:
        mpi = DLIOMPI.get_instance()
        if mpi.size() > 1:
            sys.stderr.write(f"[KVIO] rank {mpi.rank()} failed, all ranks stop\n")
            traceback.print_exc()
            sys.stderr.flush()
            counts.end()
            mpi.comm().Abort(1)
        raise
