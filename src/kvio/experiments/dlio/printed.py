"""What a run of DLIO says: its metrics, its times and kvio's counts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

_PART: Final = r"(\d+) blocks \(([\d.]+) MiB\)(?: in ([\d.]+) s)?"
_COUNTS: Final = re.compile(
    rf"\[KVIO\] (rank \d+|all \d+ ranks): wrote {_PART}, read {_PART}; "
    rf"checkpoints: wrote {_PART}, read {_PART}"
)
_STAMP: Final = r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})"
_GENERATION: Final = re.compile(
    rf"{_STAMP} Starting data generation.*?{_STAMP} Generation done", re.DOTALL
)


class Window(NamedTuple):
    """Blocks, and the seconds from the start of the first to the end of the last (None: none)."""

    blocks: int
    mib: float
    seconds: float | None


class Counts(NamedTuple):
    """What went through kvio on one rank, or on all."""

    wrote: Window
    read: Window
    checkpoints_wrote: Window
    checkpoints_read: Window


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioRun:
    """How one run of ``dlio_benchmark`` ended, what it printed and the files it left.

    Attributes:
        status: of the process; 0 is success.
        text: standard output and standard error of all ranks.
        wall_s: from the start of the process, or of mpirun, to its end.
        user_s, system_s: processor time of it and all it started.
        summary: DLIO's ``summary.json``, empty where it wrote none.
        per_epoch: DLIO's ``per_epoch_stats.json``; its time stamps have microseconds, where the
            durations that DLIO prints are rounded to 10 ms.
    """

    status: int
    text: str
    wall_s: float
    user_s: float
    system_s: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    per_epoch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> list[Counts]:
        """Counts of kvio by rank; none where nothing went through kvio."""
        found = [line for line in self._lines() if line[0].startswith("rank")]
        return [counts for _, counts in sorted(found, key=lambda line: int(line[0].split()[1]))]

    @property
    def all_ranks(self) -> Counts | None:
        """Counts of kvio over all ranks; windows are from the first's start to the last's end.

        None where nothing went through kvio, or where no such line was printed for several ranks.
        """
        together = [counts for who, counts in self._lines() if who.startswith("all")]
        ranks = self.counts
        return together[0] if together else ranks[0] if len(ranks) == 1 else None

    @property
    def samples_per_s(self) -> float | None:
        """DLIO's training throughput, the mean of all epochs and the sum of all ranks."""
        return self._metric("train_throughput_mean_samples_per_second")

    @property
    def au_percent(self) -> float | None:
        """DLIO's accelerator utilization, the mean of all epochs and ranks."""
        return self._metric("train_au_mean_percentage")

    @property
    def io_mb_per_s(self) -> float | None:
        """DLIO's training I/O throughput, in the MB of 2**20 bytes that DLIO means."""
        return self._metric("train_io_mean_MB_per_second")

    @property
    def generation_s(self) -> float | None:
        """From DLIO's "Starting data generation" to its "Generation done", behind a barrier."""
        found = _GENERATION.search(self.text)
        return _seconds(found[1], found[2]) if found else None

    @property
    def epochs_s(self) -> list[float]:
        """Each epoch of training with its checkpoints, from rank 0's start behind a barrier."""
        return [_seconds(epoch["start"], epoch["end"]) for epoch in self.per_epoch.values()]

    @property
    def checkpoints_s(self) -> list[float]:
        """Each checkpoint, as rank 0 saw it."""
        return [
            _seconds(part["start"], part["end"])
            for epoch in self.per_epoch.values()
            for name, part in epoch.items()
            if name.startswith("ckpt")
        ]

    def _metric(self, name: str) -> float | None:
        found = self.summary.get("metric", {}).get(name)
        return None if found is None else float(found)

    def _lines(self) -> list[tuple[str, Counts]]:
        return [(line[1], _counts(line.groups()[1:])) for line in _COUNTS.finditer(self.text)]


def read_json(path: Path) -> dict[str, Any]:
    """Read one of DLIO's files; empty where the run ended before it was written."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _counts(parts: tuple[str | None, ...]) -> Counts:
    triples = [parts[at : at + 3] for at in range(0, len(parts), 3)]
    windows = [
        Window(int(blocks or 0), float(mib or 0), None if seconds is None else float(seconds))
        for blocks, mib, seconds in triples
    ]
    return Counts(*windows)


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
