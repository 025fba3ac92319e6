"""A contender's turn at a load: DLIO runs, alone or through kvio, or the direct harness does."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from kvio.experiments.dlio.process import DlioRun
from kvio.experiments.measure import Sample
from kvio.experiments.s3.dlio_plan import STOCK, Load
from kvio.experiments.s3.dlio_runs import (
    Expected,
    StartUp,
    generate,
    generate_stock,
    key_of,
    start_up,
)
from kvio.experiments.s3.order import PUT, kind_of, library_of
from kvio.experiments.s3.plan import REAL
from kvio.experiments.s3.server import Server
from kvio.experiments.s3.turns import Turns, end

_MAIN: Final = "main"


class DlioTurns:
    """What the turns of a run share.

    Attributes:
        notes: what a reader must know beside the numbers.
    """

    def __init__(
        self,
        servers: Mapping[str, Server],
        direct: Turns,
        *,
        memory: Path,
        scratch: Path,
        prefix: str,
    ) -> None:
        self.notes: list[str] = []
        self._servers = servers
        self._inspectors = {name: server.inspector() for name, server in servers.items()}
        self._direct = direct
        self._memory = memory
        self._scratch = scratch
        self._prefix = f"{prefix}/{secrets.token_hex(4)}"
        self._expected: dict[str, Expected] = {}
        self._start_up: dict[tuple[int, int], StartUp] = {}
        self._stock_done: set[tuple[str, int]] = set()

    def take(self, load: Load, name: str, index: int) -> Iterator[Sample]:
        """Run a load, look at what was stored, remove it."""
        if kind_of(name) == "kvio":
            for sample in self._direct.take(load.case, name, index):
                yield replace(sample, facts={**sample.facts, **_shared(load)})
            return
        if str(load) not in self._expected or name == STOCK:
            yield from self._stock(load, index)
        if name != STOCK:
            yield self._through(load, name, index, self._expected[str(load)])

    def close(self) -> None:
        """Remove what interrupted turns left, and close connections."""
        self.notes += end(self._inspectors.values(), self._prefix)

    def _stock(self, load: Load, index: int) -> Iterator[Sample]:
        """Generate by DLIO alone, once a round: whoever is first needs to know what is right."""
        if (str(load), index) in self._stock_done:
            return
        at = load.case.processes, index
        if at not in self._start_up:
            if not self._start_up:
                start_up(load, self._memory)  # the first run reads modules that others find cached
            self._start_up[at] = start_up(load, self._memory)
        keep = None
        if str(load) not in self._expected:
            keep = Path(tempfile.mkdtemp(prefix="expected-", dir=self._scratch))
        run, expected = generate_stock(load, self._memory, keep)
        if expected is not None:
            self._expected[str(load)] = expected
        self._stock_done.add((str(load), index))
        known = self._expected[str(load)]
        began = self._start_up[at]
        more = {"start_wall_s": began.wall_s, "start_cpu_s": began.cpu_s}
        window = run.generation_s or run.wall_s
        yield _sample(load, STOCK, index, window, run, {**_stored(known, 0), **more})

    def _through(self, load: Load, name: str, index: int, expected: Expected) -> Sample:
        """Generate through a library, and compare with what DLIO alone generates."""
        at = REAL if REAL in load.parts else _MAIN
        server, inspector = self._servers[at], self._inspectors[at]
        prefix = f"{self._prefix}/{library_of(name)}"
        before = server.cpu_s()
        try:
            run = generate(load, library_of(name), server, prefix, self._memory)
            after = server.cpu_s()
            errors = errors_of(inspector, inspector.sizes(f"{prefix}/"), prefix, expected)
        finally:
            inspector.delete(list(inspector.sizes(f"{prefix}/")))
        told = run.all_ranks
        if told is None or told.wrote.blocks != len(expected.sizes):
            errors = max(1, errors)  # it wrote, but not through kvio
        window = told.wrote.seconds if told is not None else None
        facts = _stored(expected, errors)
        facts["server_s"] = None if before is None or after is None else after - before
        return _sample(load, name, index, window or run.wall_s, run, facts)


class Holds(Protocol):
    """Whoever can tell whether an object begins with some bytes."""

    def holds(self, key: str, payload: bytes) -> bool: ...  # noqa: D102


def errors_of(inspector: Holds, sizes: Mapping[str, int], prefix: str, expected: Expected) -> int:
    """Count objects that are missing, too many, of another length or of other bytes."""
    wanted = {key_of(prefix, name): nbytes for name, nbytes in expected.sizes.items()}
    wrong = {key for key in wanted.keys() | sizes.keys() if wanted.get(key) != sizes.get(key)}
    for name, path in expected.files.items():
        key = key_of(prefix, name)
        if key not in wrong and not inspector.holds(key, path.read_bytes()):
            wrong.add(key)
    return len(wrong)


def _stored(expected: Expected, errors: int) -> dict[str, Any]:
    nbytes = sum(expected.sizes.values())
    return {"objects": len(expected.sizes), "bytes": nbytes, "errors": errors}


def _shared(load: Load) -> dict[str, Any]:
    return {"part": load.parts[0], "parts": list(load.parts), "format": load.format}


def _sample(
    load: Load, name: str, index: int, window_s: float, run: DlioRun, facts: Mapping[str, Any]
) -> Sample:
    """Keep a run; DLIO tells no latencies, so they are all the mean."""
    case = load.case
    return Sample(
        subject=case.subject,
        block_nbytes=case.nbytes,
        contender=name,
        checksum=False,
        operation=PUT,
        round=index,
        wall_s=window_s,
        latencies_s=[window_s / load.objects] * load.objects,
        intact=facts["errors"] == 0,
        facts={
            **_shared(load),
            "library": library_of(name),
            "kind": kind_of(name) if name != STOCK else STOCK,
            "object_nbytes": case.nbytes,
            "threads": case.threads,
            "processes": case.processes,
            "user_s": run.user_s,
            "system_s": run.system_s,
            "server_s": None,
            "cut_short": False,
            "process_wall_s": run.wall_s,
            "process_cpu_s": run.user_s + run.system_s,
            "generation_s": run.generation_s,
            **facts,
        },
    )
