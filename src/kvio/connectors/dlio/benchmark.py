"""Check the options of a run, and at its end the blocks that every rank wrote and read."""

from __future__ import annotations

import errno
import logging
import math
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from dlio_benchmark.utils.utility import DLIOMPI

from kvio.connectors.dlio import blocks, counts
from kvio.connectors.dlio.checkpoints import _Checkpointing
from kvio.connectors.dlio.counts import Counts, Moved
from kvio.connectors.dlio.defaults import filled_in, goes_through_kvio, storage_type
from kvio.connectors.dlio.loader import KvioLoader
from kvio.connectors.dlio.plan import Checkpoints, checkpoints_of, generated_files, workload_of
from kvio.connectors.dlio.readers import KvioReader
from kvio.connectors.dlio.settings import PlanError
from kvio.errors import AccessDeniedError, ConfigError, UnsupportedError
from kvio.types import MiB

_CLASSES: Final = {
    "data_loader_classname": "data_loader_class",
    "reader_classname": "reader_class",
    "checkpoint_mechanism_classname": "checkpoint_mechanism_class",
}
#: Both forms of the enumeration's str(), which depends on the Python version.
_ON_DEMAND: Final = ("on_demand", "ReadType.ON_DEMAND")


def check_options(args: Any) -> None:
    """Refuse a run whose reads would bypass kvio or could not start.

    Raises:
        PlanError: DLIO did not find a named class, which it does not report; or the reader is not
            kvio's.
        UnsupportedError: blocks would be cached in memory.
        ConfigError: there are more threads than samples; DLIO divides by samples per thread.
    """
    for option, found in _CLASSES.items():
        if getattr(args, option) is not None and getattr(args, found) is None:
            raise PlanError(
                f"DLIO did not find {option}={getattr(args, option)} and would have ignored it"
            )
    if not workload_of(args).train:
        return
    if not _is(args.reader_class, KvioReader):
        raise PlanError(
            "storage_type is parallel_fs, but the reader is not kvio's: DLIO's readers open paths; "
            "remove reader_classname"
        )
    if str(args.read_type) not in _ON_DEMAND:
        raise UnsupportedError(
            f"reader.read_type={args.read_type} caches blocks between epochs, but kvio reads each "
            "block when it is needed; use on_demand"
        )
    one = workload_of(args).training
    share = math.ceil(one.files * one.samples_per_file / one.ranks)
    if str(args.data_loader_sampler) == "iterative" and args.read_threads > share:
        raise ConfigError(
            f"read_threads={args.read_threads}, but a rank has {share} samples: DLIO needs at "
            "least one sample per thread; reduce read_threads"
        )


def check_writable(args: Any) -> None:
    """Refuse a run that would write to a store which is open read-only, before it begins.

    Raises:
        AccessDeniedError: blocks cannot be written there.
    """
    stores = []
    if args.generate_data:
        stores.append(("generate data", blocks.data_store()))
    if args.do_checkpoint:
        stores.append(("write checkpoints", blocks.checkpoint_store()))
    for doing, store in stores:
        if store.url.host:
            continue  # a bucket is never open read-only, and its capabilities are found by writing
        can = store.capabilities
        if not can.writable:
            why = "; ".join(can.notes)
            raise AccessDeniedError(
                f"DLIO on kvio: cannot {doing} in {store!r}: {why}", errno=errno.EROFS
            )


def report(args: Any, found: Sequence[Counts]) -> None:
    """Print what every rank wrote and read, and the time from the first block to the last.

    Like DLIO's metrics: later releases have a logger with a level for results, and show no others.
    """
    logger = getattr(args, "logger", None)
    say = getattr(logger, "output", logging.info)
    for rank, one in enumerate(found):
        say(f"[KVIO] rank {rank}: {_summary(one)}")
    if len(found) > 1:
        say(f"[KVIO] all {len(found)} ranks: {_summary(sum(found, Counts()))}")


def _summary(one: Counts) -> str:
    return (
        f"wrote {_blocks(one.writes)}, read {_blocks(one.reads)}; checkpoints: "
        f"wrote {_blocks(one.checkpoint_writes)}, read {_blocks(one.checkpoint_reads)}"
    )


def check_counts(
    args: Any, found: Sequence[Counts], *, generated: int, checkpoints: Sequence[Checkpoints | None]
) -> None:
    """Compare the blocks that went through kvio with the workload.

    kvio's loader reads exactly the planned blocks; where it keeps blocks of several samples, each
    block at least once an epoch. DLIO's loader reads ahead, so it reads at least what is planned.

    Args:
        args: DLIO's parsed options.
        found: the counts of every rank.
        generated: files that the workload generates.
        checkpoints: those of every rank; None: not kvio's.

    Raises:
        PlanError: the counts differ; the error lists every difference.
    """
    workload = workload_of(args, generated=generated)
    wrong = []
    written = sum(one.writes.blocks for one in found)
    if written != workload.writes():
        wrong.append(f"{written} samples were written of {workload.writes()}")
    exact = _is(args.data_loader_class, KvioLoader)
    for rank, (one, saved) in enumerate(zip(found, checkpoints, strict=True)):
        least = workload.fewest_reads(rank) if exact else workload.least_reads(rank)
        most = workload.reads(rank) if exact else math.inf
        reads = one.reads.blocks
        if not least <= reads <= most:
            wrong.append(f"rank {rank} read {reads} samples of {least if reads < least else most}")
        if saved is None:
            continue
        for verb, blocks_of, files in (
            ("wrote", one.checkpoint_writes.blocks, saved.writes()),
            ("read", one.checkpoint_reads.blocks, saved.reads()),
        ):
            if blocks_of != files:
                wrong.append(f"rank {rank} {verb} {blocks_of} checkpoint files of {files}")
    if wrong:
        raise PlanError(f"not all of this run went through kvio: {'; '.join(wrong)}")


def _is(found: Any, kind: type[Any]) -> bool:
    return isinstance(found, type) and issubclass(found, kind)


def _blocks(moved: Moved) -> str:
    window = f" in {moved.seconds:.3f} s" if moved.blocks else ""
    return f"{moved.blocks} blocks ({moved.nbytes / MiB:.1f} MiB){window}"


# --------------------------------------------------------------------------------------------------
# Wrap DLIO's benchmark: fill in options, stop all ranks on an error, check the block counts.


def watched(original: Any) -> Any:
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
                self._generated = generated_files(self.args)

        def initialize(self) -> None:
            with _stopping_all_ranks():
                if self._kvio:
                    check_writable(self.args)
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
            ranks = self.comm.allgather((counts.total(), self._checkpoints()))
            found = [one for one, _ in ranks]
            if self.args.my_rank == 0:
                report(self.args, found)
            check_counts(
                self.args,
                found,
                generated=self._generated,
                checkpoints=[saved for _, saved in ranks],
            )

        def _checkpoints(self) -> Checkpoints | None:
            mechanism = self.checkpointing_mechanism
            if not isinstance(mechanism, _Checkpointing):
                return None
            return checkpoints_of(self.args, workload_of(self.args), mechanism)

    KvioBenchmark.__name__ = KvioBenchmark.__qualname__ = original.__name__
    return KvioBenchmark


def _warn(workload: Any) -> None:
    sys.stderr.write(
        f"[KVIO] warning: kvio is configured, but storage_type is {storage_type(workload)}: "
        "nothing goes through "
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
