"""A turn of one contender: all ranks at the same time, operation after operation."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import kvio
from kvio import MiB, StorageError, UnsupportedError
from kvio.experiments import page_cache
from kvio.experiments.measure import Sample
from kvio.experiments.staging import daemon as daemons
from kvio.experiments.staging.fleet import Fleet
from kvio.experiments.staging.lanes import memory
from kvio.experiments.staging.order import (
    DAEMON,
    DRAIN,
    FILES,
    MEMCPY,
    SAFE,
    TIERS,
    WRITE,
    Case,
    Order,
    Window,
    steps_of,
    url_of,
)

#: From the command to the start of the clock: every rank has it by then.
_LEAD_S: Final = 0.005
_LEAD_OF_RANK_S: Final = 0.001


class Turns:
    """What the turns of a run share.

    Args:
        base: an empty directory on the medium.
        begin: gives so many ranks.

    Attributes:
        lost: turns that ended early because a rank failed or died.
    """

    def __init__(
        self,
        base: Path,
        begin: Callable[[int], Fleet],
        cases: Sequence[Case],
        *,
        drain_threads: int,
        checksum: bool,
    ) -> None:
        self.lost: list[str] = []
        self._base = base
        self._begin = begin
        self._ranks = max(case.ranks for case in cases)
        self._fleet: Fleet | None = None
        self._drain_threads = drain_threads
        self._checksum = checksum
        self._emptied: set[str] = set()
        self._memory = memory(max(MiB, *(case.total_bytes for case in cases)))
        self._roots = {kind: base / kind for kind in ("blocks", "files")}
        for root in self._roots.values():
            root.mkdir(mode=0o700)
        with suppress(UnsupportedError):  # a durable store makes every directory when it opens
            blocks = self._roots["blocks"]
            kvio.open_store("posix-tmpfile", root=blocks, durability="durable").close()

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Take all operations of a contender, a sample each.

        Raises:
            UnsupportedError: the medium cannot do it, or a rank failed or died.
        """
        if self._fleet is None:
            self._fleet = self._begin(self._ranks)
        root = self._roots["files" if name in FILES else "blocks"]
        try:
            scratch = self._memory[: max(MiB, case.total_bytes)]
            page_cache.touch_memory(self._base / "scratch", scratch)
            with self._daemon(case, name, root) as daemon:
                socket = daemon.socket if daemon else None
                self._open(self._fleet, case, name, index, root, socket)
                for operation in steps_of(name):
                    yield self._measure(self._fleet, case, name, index, operation, daemon)
                self._fleet.ask([{"do": "close"}] * case.ranks)
        except UnsupportedError as exc:
            raise UnsupportedError(str(exc).replace(str(self._base), "…")) from exc
        except StorageError as exc:
            self.lost.append(f"LOST: {name}, {case}, round {index + 1}: {exc}")
            self.close()
            raise UnsupportedError(f"{exc} ({case}, round {index + 1})") from exc
        finally:
            self._empty(root)

    def _daemon(
        self, case: Case, name: str, root: Path
    ) -> AbstractContextManager[daemons.Daemon | None]:
        if name != DAEMON:
            return nullcontext()
        url = url_of(TIERS[name], str(root), checksum=self._checksum)
        threads = case.ranks * self._drain_threads
        return daemons.serving(url, capacity_bytes=case.total_bytes, drain_threads=threads)

    def _open(
        self, fleet: Fleet, case: Case, name: str, index: int, root: Path, socket: str | None
    ) -> None:
        tag = f"{re.sub('[^a-zA-Z0-9]+', '_', name)}/{case.ranks}x{case.nbytes}/{index}"
        orders = [
            Order(
                contender=name,
                root=str(root),
                tag=tag,
                rank=rank,
                nbytes=case.nbytes,
                count=case.count,
                drain_threads=self._drain_threads,
                checksum=self._checksum,
                socket=socket,
            )
            for rank in range(case.ranks)
        ]
        fleet.ask([{"do": "open", "order": asdict(order)} for order in orders])

    def _measure(
        self,
        fleet: Fleet,
        case: Case,
        name: str,
        index: int,
        operation: str,
        daemon: daemons.Daemon | None,
    ) -> Sample:
        """Run the clock over one operation, and look at the bytes after it."""
        fleet.ask([{"do": "ready", "operation": operation}] * case.ranks)
        stores = operation in (WRITE, DRAIN)
        if stores:
            os.sync()  # what others left to be written back is not to land on this one
        busy_s, daemon_s = machine_cpu_s(), daemon.cpu_s() if daemon else 0.0
        at_s = time.monotonic() + _LEAD_S + case.ranks * _LEAD_OF_RANK_S
        go = {"do": "go", "operation": operation, "at_s": at_s}
        windows = [Window(**answer) for answer in fleet.ask([go] * case.ranks)]
        if daemon:
            daemon_s = daemon.cpu_s() - daemon_s
        if stores:
            os.sync()
        synced_s, busy_s = time.monotonic(), machine_cpu_s() - busy_s
        checked = fleet.ask([{"do": "check", "operation": operation}] * case.ranks)
        start_s = min(window.start_s for window in windows)
        settled_s = max(window.settled_s for window in windows) - start_s
        facts: dict[str, Any] = {
            "ranks": case.ranks,
            "late_s": max(window.start_s for window in windows) - start_s,
            "cpu_s": sum(window.cpu_s for window in windows) + daemon_s,
        }
        if stores:
            facts |= {"settled_s": settled_s, "machine_cpu_s": busy_s}
            if name != MEMCPY:
                facts["durable_s"] = settled_s if name in SAFE else synced_s - start_s
        verdicts = [answer["intact"] for answer in checked]
        return Sample(
            subject=case.subject,
            block_nbytes=case.nbytes,
            contender=name,
            checksum=self._checksum,
            operation=operation,
            round=index,
            wall_s=max(window.end_s for window in windows) - start_s,
            latencies_s=[one for window in windows for one in window.latencies_s],
            intact=None if None in verdicts else all(verdicts),
            facts=facts,
        )

    def _empty(self, root: Path) -> None:
        """Free the files' space; they are removed at the very end.

        ext4 gives no inode out again for some minutes after it was deleted, and every creation
        steps over all of them (fs/ext4/ialloc.c, recently_deleted).
        """
        for directory, _, files in os.walk(root):
            for name in files:
                path = os.path.join(directory, name)
                if path not in self._emptied:
                    os.truncate(path, 0)
                    self._emptied.add(path)

    def close(self) -> None:
        """End the ranks; the next turn begins others."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()


def machine_cpu_s() -> float:
    """Read what all processors have done so far, the kernel's own threads included: proc(5)."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
