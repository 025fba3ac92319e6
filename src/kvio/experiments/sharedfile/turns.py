"""A turn of one contender: all writers at the same time, then the sync, the seal, and a look."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvio import MiB, StorageError, UnsupportedError
from kvio.experiments import page_cache
from kvio.experiments.measure import Sample
from kvio.experiments.sharedfile import ior, program
from kvio.experiments.sharedfile.order import (
    CONTENDERS,
    DURABLE,
    THREADS,
    WRITE,
    Case,
    Order,
    Window,
)
from kvio.experiments.staging.fleet import Fleet
from kvio.experiments.staging.lanes import memory
from kvio.placement import Placement, Topology

#: From the command to the start of the clock: every process has it by then.
_LEAD_S: Final = 0.01
_LEAD_OF_WRITER_S: Final = 0.002


class Turns:
    """What the turns of a run share.

    Args:
        base: an empty directory on the medium.
        begin: gives so many processes.
        in_job: this is an MPI job, in which no other can be started.

    Attributes:
        lost: turns that ended early because a process failed or died.
    """

    def __init__(
        self, base: Path, begin: Callable[[int], Fleet], cases: Sequence[Case], *, in_job: bool
    ) -> None:
        self.lost: list[str] = []
        self._base, self._begin, self._in_job = base, begin, in_job
        self._processes = max(case.writers if case.kind != THREADS else 1 for case in cases)
        self._fleet: Fleet | None = None
        self._memory = memory(max(MiB, *(case.total_bytes for case in cases)))
        self._program: str | None = None
        self._topology = Topology.from_system()

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Take a contender's turn: a sample for writing, and one until all is durable.

        Raises:
            UnsupportedError: the medium cannot do it, or a process failed or died.
        """
        root = Path(tempfile.mkdtemp(dir=self._base))
        try:
            if CONTENDERS[name].way == "ior":
                yield from self._take_ior(case, name, index, root)
            else:
                yield from self._take(case, name, index, root)
        except UnsupportedError as exc:
            raise UnsupportedError(str(exc).replace(str(root), "…")) from exc
        except StorageError as exc:
            said = str(exc).replace(str(root), "…")
            self.lost.append(f"LOST: {name}, {case}, round {index + 1}: {said}")
            self.close()
            raise UnsupportedError(f"{said} ({case}, round {index + 1})") from exc
        finally:
            shutil.rmtree(root)

    def _take(self, case: Case, name: str, index: int, root: Path) -> Iterator[Sample]:
        if self._fleet is None:
            self._fleet = self._begin(self._processes)
        orders = self._orders(case, name, root)
        prepare = [{"do": "prepare", "order": asdict(order)} for order in orders]
        created = self._fleet.ask(prepare)[0]["created_s"]
        self._fleet.ask([{"do": "open"}] * len(orders))
        self._settle(case, name)
        at_s = time.monotonic() + _LEAD_S + len(orders) * _LEAD_OF_WRITER_S
        answers = self._fleet.ask([{"do": "go", "at_s": at_s}] * len(orders))
        [sealed] = self._fleet.ask([{"do": "seal"}])
        page_cache.drop(root)
        checked = self._fleet.ask([{"do": "check"}] * len(orders))
        self._fleet.ask([{"do": "close"}] * len(orders))
        windows = [Window(**answer) for answer in answers]
        intact = all(answer["intact"] for answer in checked)
        yield from _samples(case, name, index, windows, sealed, intact, created)

    def _settle(self, case: Case, name: str) -> None:
        """Leave nothing of others to be written back, and memory for the page cache.

        Free memory is given back to the host of a virtual machine in large pieces, and writing to
        it again is ten times slower: transfers that take large pieces must have touched such ones.
        """
        if not CONTENDERS[name].direct:
            scratch, source = self._base / "scratch", self._memory[: case.total_bytes]
            page_cache.touch_memory(scratch, source)
            with open(scratch, "wb", buffering=0) as file:
                for at in 2 * list(range(0, len(source), case.transfer_bytes)):
                    file.write(source[at : at + case.transfer_bytes])
                file.truncate(0)
        os.sync()

    def _orders(self, case: Case, name: str, root: Path) -> list[Order]:
        """Divide the writers over processes: one each, or all in the first."""
        cpus = self._cpus(case)
        everyone = list(range(case.writers))
        shares = [everyone] if case.kind == THREADS else [[writer] for writer in everyone]
        return [
            Order(
                contender=name,
                root=str(root),
                case=asdict(case),
                writers=share,
                cpus=[cpus[writer] for writer in share],
                program=self._compiled() if CONTENDERS[name].way == "C" else "",
            )
            for share in shares
        ]

    def _cpus(self, case: Case) -> list[list[int] | None]:
        if not case.placement:
            return [None] * case.writers
        map_by, _, order = case.placement.partition("/")
        wish = Placement(map_by=map_by, order=order)  # type: ignore[arg-type]  # it checks them
        return [list(slot.cpus) for slot in wish.slots(self._topology, case.writers)]

    def _compiled(self) -> str:
        if self._program is None:
            folder = self._base / "program"
            folder.mkdir(exist_ok=True)
            self._program = program.compile_program(folder)
        return self._program

    def _take_ior(self, case: Case, name: str, index: int, root: Path) -> Iterator[Sample]:
        if self._in_job:
            raise UnsupportedError("this is an MPI job, in which mpirun cannot start another")
        if case.kind == THREADS or case.placement:
            return
        self._settle(case, name)
        yield ior.take(case, name, index, root, direct=CONTENDERS[name].direct)

    def close(self) -> None:
        """End the processes; the next turn begins others."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()


def _samples(
    case: Case,
    name: str,
    index: int,
    windows: Sequence[Window],
    sealed: dict[str, Any],
    intact: bool,  # noqa: FBT001
    created_s: float,
) -> Iterator[Sample]:
    started = [at for window in windows for at in window.started_s]
    ended = [at for window in windows for at in window.ended_s]
    start_s, written_s = min(started), max(ended) - min(started)
    synced_s = max(window.synced_s for window in windows) - start_s
    seal_s = sealed["seal_s"]
    facts = {
        "writers": case.writers,
        "created_s": None if CONTENDERS[name].separate else created_s,
        "late_s": max(started) - start_s,
        "synced_s": synced_s,
        "seal_s": seal_s,
        "writer_s": [b - a for a, b in zip(started, ended, strict=True)],
        "user_s": sum(window.user_s for window in windows) + sealed["user_s"],
        "system_s": sum(window.system_s for window in windows) + sealed["system_s"],
    }
    walls = {WRITE: written_s, DURABLE: synced_s + (seal_s or 0.0)}
    if CONTENDERS[name].way == "store":  # a call returns when its block is durable
        walls = {DURABLE: written_s}
    for operation, wall_s in walls.items():
        yield Sample(
            subject=case.subject,
            block_nbytes=case.transfer_bytes,
            contender=name,
            checksum=CONTENDERS[name].checksum and CONTENDERS[name].way in ("kvio", "store"),
            operation=operation,
            round=index,
            wall_s=wall_s,
            latencies_s=[one for window in windows for one in window.latencies_s],
            modes={sealed["mode"]: 1} if sealed["mode"] else {},
            reasons=[sealed["reason"]] if sealed["reason"] else [],
            intact=intact,
            facts=facts,
        )
