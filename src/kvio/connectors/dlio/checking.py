"""The end of a run: were the blocks that its workload says written and read, on every rank?"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Final

from kvio.connectors.dlio.checkpoints import _Checkpointing
from kvio.connectors.dlio.counts import Counts, Moved
from kvio.connectors.dlio.describing import checkpoints_of, workload_of
from kvio.connectors.dlio.errors import PlanError
from kvio.connectors.dlio.loader import KvioLoader
from kvio.connectors.dlio.readers import KvioReader
from kvio.connectors.dlio.versions import PYPI, Release
from kvio.errors import ConfigError, UnsupportedError
from kvio.types import MiB

_CLASSES: Final = {
    "data_loader_classname": "data_loader_class",
    "reader_classname": "reader_class",
    "checkpoint_mechanism_classname": "checkpoint_mechanism_class",
}
#: As the enumeration prints it, which differs by version of Python.
_ON_DEMAND: Final = ("on_demand", "ReadType.ON_DEMAND")


def check_options(args: Any) -> None:
    """Refuse a run whose reads would go around kvio, or could not begin.

    Raises:
        PlanError: a class was named that DLIO did not find, which it says nowhere; or the reader
            is not kvio's.
        UnsupportedError: blocks are to be kept in memory.
        ConfigError: there are more threads than samples: DLIO divides by the ratio.
    """
    for option, found in _CLASSES.items():
        if getattr(args, option) is not None and getattr(args, found) is None:
            raise PlanError(f"DLIO did not find {option}={getattr(args, option)} and went on")
    if args.generate_only:
        return
    if not _is(args.reader_class, KvioReader):
        raise PlanError(
            "storage_type is parallel_fs, but the reader is not kvio's: DLIO's own open paths; "
            "leave reader_classname to kvio"
        )
    if str(args.read_type) not in _ON_DEMAND:
        raise UnsupportedError(
            f"reader.read_type={args.read_type} keeps blocks from epoch to epoch: kvio reads "
            "each when it is asked for; use on_demand"
        )
    one = workload_of(args).training
    share = math.ceil(one.files * one.samples_per_file / one.ranks)
    if str(args.data_loader_sampler) == "iterative" and args.read_threads > share:
        raise ConfigError(
            f"read_threads={args.read_threads}, but a rank has {share} samples: DLIO cannot share "
            "them among its threads"
        )


def report(found: Sequence[Counts]) -> None:
    """Say what every rank wrote and read, and from the first block to the last in what time."""
    for rank, one in enumerate(found):
        logging.info(f"[KVIO] rank {rank}: {_told(one)}")
    if len(found) > 1:
        logging.info(f"[KVIO] all {len(found)} ranks: {_told(sum(found, Counts()))}")


def _told(one: Counts) -> str:
    return (
        f"wrote {_blocks(one.writes)}, read {_blocks(one.reads)}; checkpoints: "
        f"wrote {_blocks(one.checkpoint_writes)}, read {_blocks(one.checkpoint_reads)}"
    )


def check_counts(args: Any, found: Sequence[Counts], release: Release) -> None:
    """Compare what went through kvio with what the workload says.

    Reads of DLIO's own loader run ahead, and are at least the plan; kvio's are the plan.

    Raises:
        PlanError: with every difference.
    """
    workload = workload_of(args)
    wrong = []
    written = sum(one.writes.blocks for one in found)
    if written != workload.writes():
        wrong.append(f"{written} samples were written of {workload.writes()}")
    exact = _is(args.data_loader_class, KvioLoader)
    for rank, one in enumerate(found):
        planned = workload.reads(rank) if exact else workload.least_reads(rank)
        reads = one.reads.blocks
        if reads < planned or (exact and reads > planned):
            wrong.append(f"rank {rank} read {reads} samples of {planned}")
        if release is PYPI and _is(args.checkpoint_mechanism_class, _Checkpointing):
            planned = checkpoints_of(args, workload, rank=rank).writes()
            saved = one.checkpoint_writes.blocks
            if saved != planned:
                wrong.append(f"rank {rank} wrote {saved} checkpoint files of {planned}")
    if wrong:
        raise PlanError(f"not all of this run went through kvio: {'; '.join(wrong)}")


def _is(found: Any, kind: type[Any]) -> bool:
    return isinstance(found, type) and issubclass(found, kind)


def _blocks(moved: Moved) -> str:
    window = f" in {moved.seconds:.3f} s" if moved.blocks else ""
    return f"{moved.blocks} blocks ({moved.nbytes / MiB:.1f} MiB){window}"
