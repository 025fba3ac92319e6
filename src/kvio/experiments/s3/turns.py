"""A contender's turn at a case: client processes run it, and what it left is looked at."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvio import StorageError, UnsupportedError
from kvio.experiments.measure import Sample
from kvio.experiments.s3 import payload
from kvio.experiments.s3.fleet import Begin, Ended, run_load
from kvio.experiments.s3.libraries import RAW_CLIENT
from kvio.experiments.s3.order import (
    GET,
    PUT,
    RANGE,
    Order,
    Window,
    kind_of,
    library_of,
)
from kvio.experiments.s3.plan import READS, REAL, Case
from kvio.experiments.s3.raw import Inspector, find
from kvio.experiments.s3.server import Server

#: No call begins later in an operation's window: a library of 40 ms a call is slow enough by then.
LIMIT_S: Final = 3.0
_TRAILER_NBYTES: Final = 64


class Turns:
    """What the turns of a run share.

    Attributes:
        notes: what a reader must know beside the numbers.
    """

    def __init__(
        self,
        servers: Mapping[str, Server],
        begin: Begin,
        scratch: Path,
        *,
        kind: str,
        prefix: str,
    ) -> None:
        self.notes: list[str] = []
        self._servers = servers
        self._inspectors = {name: server.inspector() for name, server in servers.items()}
        self._begin = begin
        self._scratch = scratch
        self._kind = kind
        self._prefix = f"{prefix}/{secrets.token_hex(4)}" if prefix else secrets.token_hex(4)
        self._payloads: dict[int, tuple[Path, int]] = {}

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Run a load, look at what was stored, remove it."""
        if not case.takes(name):
            return
        server = self._servers[_server_of(case)]
        orders = [self._order(case, name, server, number) for number in range(case.processes)]
        cpu: list[float | None] = []
        environ = {**server.environ, RAW_CLIENT: str(find())}
        try:
            ended = run_load(
                orders, environ, self._begin, around=lambda: cpu.append(server.cpu_s())
            )
        except StorageError as exc:
            why = server.redacted(" ".join(str(exc).split()))[:300]
            raise UnsupportedError(f"failed: {case}: {why}") from None
        yield from self._samples(case, name, index, orders, ended, cpu)

    def close(self) -> None:
        """Remove what interrupted turns left, and close connections."""
        self.notes += end(self._inspectors.values(), self._prefix)

    def _order(self, case: Case, name: str, server: Server, number: int) -> Order:
        path, distinct = self._payload(case.nbytes)
        return Order(
            contender=name,
            endpoint=server.url,
            bucket=server.bucket,
            region=server.region,
            prefix=f"{self._prefix}/{name.replace(' ', '-')}/p{number}",
            payload=str(path),
            distinct=distinct,
            nbytes=case.nbytes,
            count=case.count,
            threads=case.threads,
            operations=case.operations,
            unsigned=server.unsigned,
            limit_s=LIMIT_S,
        )

    def _payload(self, nbytes: int) -> tuple[Path, int]:
        if nbytes not in self._payloads:
            path = self._scratch / f"payload-{nbytes}"
            self._payloads[nbytes] = path, payload.write(path, self._kind, nbytes)
        return self._payloads[nbytes]

    def _samples(
        self,
        case: Case,
        name: str,
        index: int,
        orders: Sequence[Order],
        ended: Sequence[Ended],
        cpu: Sequence[float | None],
    ) -> Iterator[Sample]:
        stored = self._look(self._inspectors[_server_of(case)], orders, ended, name)
        for at, operation in enumerate(case.operations):
            if case.part == READS and operation == PUT and stored:
                continue  # it only makes what is read
            windows = [one.windows[at] for one in ended]
            wrong = [window.wrong for window in windows if window.wrong]
            intact = stored if operation == PUT else not wrong
            yield Sample(
                subject=case.subject,
                block_nbytes=orders[0].extent[1] if operation == RANGE else case.nbytes,
                contender=name,
                checksum=kind_of(name) == "kvio block",
                operation=operation,
                round=index,
                wall_s=max(w.end_s for w in windows) - min(w.start_s for w in windows),
                latencies_s=[seconds for window in windows for seconds in window.latencies_s],
                reasons=wrong,
                intact=intact,
                facts=_facts(case, name, windows, ended, cpu[2 * at : 2 * at + 2]),
            )

    def _look(
        self,
        inspector: Inspector,
        orders: Sequence[Order],
        ended: Sequence[Ended],
        name: str,
    ) -> bool:
        """Compare all lengths and some bytes with what was put, then remove everything."""
        good = True
        more = _TRAILER_NBYTES if kind_of(name) == "kvio block" else 0
        for order, one in zip(orders, ended, strict=True):
            count = len(one.windows[0].latencies_s)
            sizes = inspector.sizes(f"{order.prefix}/")
            expected = {order.key(index): order.nbytes + more for index in range(count)}
            good = good and sizes == expected
            with open(order.payload, "rb") as file:
                for index in {0, count // 2, count - 1} if sizes and good else ():
                    file.seek(index % order.distinct * order.nbytes)
                    good = good and inspector.holds(order.key(index), file.read(order.nbytes))
            inspector.delete([*sizes, *inspector.sizes(f"{order.prefix}-warm/")])
        return good


def end(inspectors: Iterable[Inspector], prefix: str) -> Iterator[str]:
    """Remove what interrupted turns left below a prefix, and close connections; what failed."""
    for inspector in inspectors:
        try:
            inspector.delete(list(inspector.sizes(f"{prefix}/")))
        except OSError as exc:
            yield f"what is below {prefix}/ could not be removed: {exc}"
        inspector.close()


def _server_of(case: Case) -> str:
    return REAL if case.part == REAL else "main"


def _facts(
    case: Case,
    name: str,
    windows: Sequence[Window],
    ended: Sequence[Ended],
    cpu: Sequence[float | None],
) -> dict[str, Any]:
    """Tell what only this experiment knows; times of processes are of those that only put."""
    before, after = cpu
    facts = {
        "part": case.part,
        "library": library_of(name),
        "kind": kind_of(name),
        "object_nbytes": case.nbytes,
        "threads": case.threads,
        "processes": case.processes,
        "user_s": sum(window.user_s for window in windows),
        "system_s": sum(window.system_s for window in windows),
        "server_s": None if before is None or after is None else after - before,
        "cut_short": any(len(window.latencies_s) < case.count for window in windows)
        and windows[0].operation in (PUT, GET, RANGE),
    }
    if case.operations == (PUT,):
        facts |= {
            "process_wall_s": max(one.wall_s for one in ended),
            "process_cpu_s": sum(one.user_s + one.system_s for one in ended),
        }
    return facts
