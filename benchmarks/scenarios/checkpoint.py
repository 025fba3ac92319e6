"""Checkpoints of torch.distributed.checkpoint: KvioWriter beside torch's FileSystemWriter.

One process saves a state of many equal tensors, waits until it is durable, and loads it with a cold
page cache. A writer that stores nothing shows what torch itself takes.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import kvio
from benchmarks.harness import columns, page_cache
from benchmarks.harness.columns import table_of
from benchmarks.harness.intervals import interval
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import COLD, Sample, Summary
from benchmarks.harness.plot import draw_bars
from benchmarks.harness.run import (
    Limits,
    Run,
    Scenario,
    check_least,
    check_names,
    check_room,
    fresh_directory,
)
from benchmarks.harness.table import Table
from kvio import MissingDependencyError

STOCK: Final = "FileSystemWriter"
NOTHING: Final = "stores nothing"
BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
CONTENDERS: Final = (STOCK, *BACKENDS, NOTHING)
TENSORS: Final = (100, 5000)
SAVE: Final = "save"

_STOCK_THREADS: Final = 4
_WIDTH: Final = 64

SCENARIO: Final = Scenario(
    name="checkpoint",
    title="Checkpoints of torch.distributed.checkpoint, durable, one process",
    reference=STOCK,
    contenders=CONTENDERS,
    claims=(
        Claim(
            text="kvio saves and loads faster than torch's own writer with four threads",
            pairs=[(backend, STOCK) for backend in BACKENDS],
            at_least=1.0,
            operations=[SAVE, COLD],
        ),
    ),
)


def run(
    limits: Limits,
    *,
    tensors: Sequence[int] = TENSORS,
    contenders: Sequence[str] = CONTENDERS,
) -> int:
    """Save and load with every contender, and print, write and plot what was found.

    Args:
        limits: where, and how much; ``max_bytes`` is the size of the state.
        tensors: numbers of tensors of a state.
        contenders: names of `CONTENDERS`.

    Returns:
        The exit status: 0; 1 if a byte differed; 130 after Ctrl-C.

    Raises:
        ConfigError: a name or a number cannot be, or the disk has no room.
        MissingDependencyError: torch is not installed.
    """
    check_names("contender", contenders, CONTENDERS)
    check_least(**{"--tensors": min(tensors)})
    try:
        import torch  # noqa: F401  # large, and for this scenario alone
    except ImportError as exc:
        raise MissingDependencyError("checkpoint needs torch: pip install torch") from exc
    check_room(limits.root, 2 * limits.max_bytes, 2 * limits.max_bytes)
    this = Run(SCENARIO, limits, {"tensors": list(tensors), "contenders": list(contenders)})
    with this.workplace() as base, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is alone
        this.take_trials(tensors, contenders, _Trials(base, limits.max_bytes).take)
        return this.finish(
            _notes(), _tables, draw_bars, conclusions=_sentences(this.samples, tensors)
        )


class _Trials:
    """The state of every number of tensors, and the directory to measure in."""

    def __init__(self, base: Path, nbytes: int) -> None:
        self._base, self._nbytes = base, nbytes
        self._states: dict[int, dict[str, Any]] = {}

    def _state(self, count: int) -> dict[str, Any]:
        import torch

        if count not in self._states:
            self._states.clear()
            torch.manual_seed(count)
            rows = max(1, self._nbytes // count // 4 // _WIDTH)
            self._states[count] = {f"layer.{n}": torch.randn(rows, _WIDTH) for n in range(count)}
        return self._states[count]

    def take(self, count: int, name: str, index: int) -> Iterator[Sample]:
        """Save in a fresh directory, twice, so that one save follows another, and load."""
        import torch
        import torch.distributed.checkpoint

        dcp: Any = torch.distributed.checkpoint
        state = self._state(count)
        nbytes = sum(tensor.nbytes for tensor in state.values())
        sample = partial(
            Sample,
            subject=f"{count} tensors",
            block_nbytes=nbytes,
            contender=name,
            checksum=name in BACKENDS,
            round=index,
        )
        with fresh_directory(self._base) as root, ExitStack() as stack:
            writer, reader = _open(name, root, stack)
            dcp.save(state, storage_writer=writer())
            page_cache.drop(root)
            cpu = time.process_time()
            took = _time(lambda: dcp.save(state, storage_writer=writer()))
            cpu = time.process_time() - cpu
            yield sample(operation=SAVE, wall_s=took, latencies_s=[took], facts={"cpu_s": cpu})
            if reader is None:
                return
            page_cache.drop(root)
            cached = page_cache.cached_fraction(root)
            target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
            cpu = time.process_time()
            took = _time(lambda: dcp.load(target, storage_reader=reader()))
            cpu = time.process_time() - cpu
            yield sample(
                operation=COLD,
                wall_s=took,
                latencies_s=[took],
                cached_before=cached,
                intact=all(torch.equal(target[key], tensor) for key, tensor in state.items()),
                facts={"cpu_s": cpu},
            )


def _time(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _open(name: str, root: Path, stack: ExitStack) -> tuple[Any, Any]:
    """Return what makes a writer and a reader of a contender."""
    import torch.distributed.checkpoint

    from kvio.connectors.torch_dcp import KvioReader, KvioWriter

    if name == NOTHING:
        return _nothing(), None
    dcp: Any = torch.distributed.checkpoint  # as torch means it, not as it exports
    if name == STOCK:
        folder = root / "stock"
        return (
            partial(dcp.FileSystemWriter, folder, thread_count=_STOCK_THREADS),
            partial(dcp.FileSystemReader, folder),
        )
    # An image in memory, which a benchmark may use, is synced as a disk is.
    options = {"trust_fsync": True}
    store = kvio.open_store(name, root=root, durability="durable", options=options)
    stack.enter_context(store)
    return partial(KvioWriter, store, "run"), partial(KvioReader, store, "run")


def _nothing() -> type[Any]:
    """Define a writer that resolves every item and stores none."""
    from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
    from torch.futures import Future

    class Nothing(StorageWriter):  # type: ignore[misc, unused-ignore]  # Any without torch
        def reset(self, checkpoint_id: Any = None) -> None:
            pass

        def set_up_storage_writer(self, *_: Any, **__: Any) -> None:
            pass

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_global_plan(self, plans: Any) -> Any:
            return plans

        def write_data(self, plan: Any, planner: Any) -> Any:
            done: Any = Future()
            found = [(item.index, planner.resolve_data(item).nbytes) for item in plan.items]
            done.set_result([WriteResult(index, nbytes, None) for index, nbytes in found])
            return done

        def finish(self, metadata: Any, results: Any) -> None:
            pass

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return bool(checkpoint_id)

    return Nothing


def _notes() -> list[str]:
    return [
        "a save over an earlier one of the same name, until it is durable; loads from an empty "
        "page cache, compared tensor by tensor outside what is timed",
        f"{STOCK}: {_STOCK_THREADS} threads, files synced, directories not; no checksums. kvio: "
        "checksums, directories synced, the earlier save kept until the new one is whole, then "
        "removed",
        f"{NOTHING}: torch's own planning and its walk over the tensors, which every writer pays",
    ]


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    shown = {
        "state": columns.SUBJECT,
        "contender": columns.CONTENDER,
        "rounds": columns.ROUNDS,
        "MB/s": columns.SPEED,
        "p50 ms": columns.P50_MS,
        "CPU s": columns.fact("cpu_s"),
        "x stock": columns.RATIO,
    }
    return [
        table_of(operation, own, samples, shown, left=("state", "contender"))
        for operation in (SAVE, COLD)
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _sentences(samples: Sequence[Sample], tensors: Sequence[int]) -> list[str]:
    """Return what more tensors cost a save, by contender, and what of it is torch's own."""
    few, many = min(tensors), max(tensors)
    took = {(s.contender, s.subject, s.round): s.wall_s for s in samples if s.operation == SAVE}
    rounds = sorted({number for *_, number in took})
    sentences = []
    for name in CONTENDERS[:-1]:
        ratios = [
            took[name, f"{many} tensors", number] / took[name, f"{few} tensors", number]
            for number in rounds
            if (name, f"{many} tensors", number) in took
            and (name, f"{few} tensors", number) in took
        ]
        shares = [
            took[NOTHING, f"{many} tensors", number] / took[name, f"{many} tensors", number]
            for number in rounds
            if (name, f"{many} tensors", number) in took
            and (NOTHING, f"{many} tensors", number) in took
        ]
        if few < many and ratios:
            torchs = f"; torch's own share {statistics.median(shares):.2f}" if shares else ""
            sentences.append(
                f"{name}: a save of {many} tensors takes {interval(ratios)} times that of {few}"
                f"{torchs}."
            )
    return sentences
