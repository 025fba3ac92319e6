"""Compares S3 libraries: through kvio, by hand in the same configuration, and as they come."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final, Protocol, TypeVar

from kvio import ConfigError, GiB
from kvio.experiments.machine import describe_machine
from kvio.experiments.measure import Sample
from kvio.experiments.run import Limits, Run
from kvio.experiments.s3 import payload, presenting, ranks
from kvio.experiments.s3.bars import RULE
from kvio.experiments.s3.order import CONTENDERS, FLOOR, LIBRARIES, library_of
from kvio.experiments.s3.plan import PARTS, REAL, Thinness, choose, real_cases
from kvio.experiments.s3.server import Server, given, in_memory, medium_of, minio
from kvio.experiments.s3.turns import LIMIT_S, Turns
from kvio.types import is_key

_BUCKET: Final = "kvio-experiment"
#: Of a server in memory: room for the objects of one turn, twice.
_RESERVE_BYTES: Final = GiB

Taken = TypeVar("Taken", contravariant=True)


def run(
    limits: Limits,
    *,
    parts: Sequence[str] = PARTS,
    objects: int = 400,
    contenders: Sequence[str] | None = None,
    payload_kind: str = "random",
    endpoint: str | None = None,
    bucket: str | None = None,
    prefix: str = "kvio-experiment",
    real: Path | None = None,
) -> int:
    """Run the experiment, print its tables and write them down.

    Args:
        limits: how much of it, and where results go; ``root`` is not used.
        parts: of `PARTS`.
        objects: of 322,957 bytes in a load; of other sizes as many bytes.
        contenders: of `CONTENDERS`, or names of libraries; None: all. The floor takes part always.
        payload_kind: ``random`` or ``jpeg``.
        endpoint: a server that runs; None: one in memory, of this run alone.
        bucket: on a given server; it must be there.
        prefix: below which all objects are; they are removed.
        real: a MinIO binary to measure some of it on, too.

    Returns:
        0; 1 if a byte differed; 2 if nothing could be measured; 130 after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
        UnsupportedError: something that all of it needs is not here.
    """
    names = _contenders(contenders)
    check(parts, objects, payload_kind, endpoint, bucket, prefix)
    with ranks.world() as world:
        if world.follows:
            world.serve()
            return 0
        chosen, thinness = choose(parts, names, objects=objects, budget_s=limits.budget_s)
        cases = [
            case for case in chosen if world.size in (1, *range(case.processes, world.size + 1))
        ]
        with ExitStack() as stack:
            servers = servers_of(stack, endpoint, bucket, real)
            cases += real_cases(objects) if REAL in servers else []
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvio-s3-")))
            turns = Turns(servers, world.begin, scratch, kind=payload_kind, prefix=prefix)
            stack.callback(turns.close)
            taken = take_turns(limits, cases, names, turns)
            medium = medium_of(servers["main"])
    options = {
        **presenting.plain(limits),
        "parts": list(parts),
        "objects": objects,
        "payload": payload_kind,
        "contenders": list(names),
        "cases": [asdict(case) for case in cases],
        "versions": presenting.versions([*LIBRARIES.values(), "botocore", "urllib3"]),
    }
    notes = [
        *_notes(limits, parts, thinness, payload_kind, world.size, servers["main"]),
        *turns.notes,
        *taken.notes(),
    ]
    if taken.samples:
        presenting.show(
            taken.samples,
            machine=describe_machine(),
            medium=medium,
            options=options,
            notes=notes,
            results=limits.results,
        )
    else:
        sys.stderr.write("nothing was measured\n" + "".join(f"{note}\n" for note in notes))
    return taken.status()


def check(
    parts: Sequence[str],
    objects: int,
    payload_kind: str,
    endpoint: str | None,
    bucket: str | None,
    prefix: str,
) -> None:
    """Look for mistakes.

    Raises:
        ConfigError: one was found.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise ConfigError(f"unknown part {(unknown or [''])[0]!r}; known: {', '.join(PARTS)}")
    if objects < 1:
        raise ConfigError(f"objects must be at least 1, not {objects}")
    if payload_kind not in payload.KINDS:
        raise ConfigError(f"unknown payload {payload_kind!r}; known: {', '.join(payload.KINDS)}")
    if not all(map(is_key, prefix.split("/"))):
        raise ConfigError(f"not a prefix: {prefix!r:.80}")
    if endpoint is not None and not bucket:
        raise ConfigError("--endpoint needs --bucket, which must be there")
    if endpoint is None and bucket:
        raise ConfigError("--bucket needs --endpoint")


def _contenders(wanted: Sequence[str] | None) -> list[str]:
    """Give the floor and what is wanted, in the order of tables."""
    known = (*CONTENDERS, *LIBRARIES)
    unknown = [name for name in wanted or () if name not in known]
    if unknown:
        raise ConfigError(
            f"unknown contender {unknown[0]!r}; known: {', '.join(LIBRARIES)}, or one of a "
            f"library: {', '.join(name for name in CONTENDERS if name.startswith('boto3'))}, ..."
        )
    return [
        name
        for name in CONTENDERS
        if wanted is None or name == FLOOR or name in wanted or library_of(name) in wanted
    ]


def servers_of(
    stack: ExitStack, endpoint: str | None, bucket: str | None, real: Path | None
) -> dict[str, Server]:
    """Begin or find the servers to measure on, with a bucket each."""
    if endpoint is None:
        server = stack.enter_context(in_memory(_BUCKET, _RESERVE_BYTES))
    else:
        server = given(endpoint, bucket or "")
    inspector = server.inspector()
    if endpoint is None:
        inspector.make_bucket()
    else:
        inspector.check_bucket()
    inspector.close()
    servers = {"main": server}
    if real is not None:
        servers[REAL] = stack.enter_context(minio(real, _BUCKET))
    return servers


class Taker(Protocol[Taken]):
    """Takes turns, and notes what a reader must know beside the numbers."""

    notes: list[str]

    def take(self, case: Taken, name: str, index: int, /) -> Iterator[Sample]:
        """Let a contender take its turn at a case."""


def take_turns(
    limits: Limits, cases: Sequence[Taken], names: Sequence[str], turns: Taker[Taken]
) -> Run:
    """Let all contenders that are installed take their turns within the limits."""
    taken = Run(limits.budget_s, limits.max_rounds)
    for name in names:
        module = LIBRARIES.get(library_of(name))
        if module is not None and importlib.util.find_spec(module) is None:
            library = library_of(name)
            taken.left_out[name] = f"needs {module} (pip install 'kvio[s3-{library}]')"
    unreached: dict[str, None] = {}

    def turn(case: Taken, name: str, index: int) -> Iterator[Sample]:
        if index == 0 and taken.progress.elapsed_s > limits.budget_s:
            unreached[str(case)] = None
            return
        yield from turns.take(case, name, index)

    taken.take_turns(cases, names, turn)
    if unreached:
        turns.notes.append(f"NOT REACHED within {limits.budget_s:g} s: {'; '.join(unreached)}")
    return taken


def _notes(
    limits: Limits,
    parts: Sequence[str],
    thinness: Thinness,
    payload_kind: str,
    world_size: int,
    server: Server,
) -> list[str]:
    notes = [
        "kvio: the store with layout=plain and checksum=none, one request an object; kvio block: "
        "the store as it is by default; direct: the library by hand, configured as kvio does; "
        "defaults: the library with nothing but an endpoint and credentials; floor: raw sockets, "
        "requests signed before the clock starts",
        "each load in a process of its own; its window is from the start signal, when every "
        "thread has a connection, to the end of the last call, and no call begins later than "
        f"{LIMIT_S:g} s in it; process s: from the start of a process that only puts to its end, "
        "interpreter and imports in it",
        "all reads end in memory of the caller that was touched before; every byte read is "
        "compared after the clock, and lengths of all and bytes of three objects of each process "
        "are looked at by the raw client",
        f"bodies are {'not hashed' if server.unsigned else 'hashed (SHA-256)'} by kvio and direct "
        "where the library leaves the choice (minio over http always hashes, torch never does); "
        "defaults as they are",
        f"x floor, and all ratios: in the same round, then the median; {RULE}",
        "CPU is the client's alone; server s/GiB is the server's own, in steps of 10 ms",
    ]
    if payload_kind == "jpeg":
        notes.append("objects are JPEGs, cut or repeated to the object's size")
    if world_size > 1:
        notes.append(
            f"started under MPI: {world_size} ranks run the client processes; loads of more "
            "processes than ranks are left out"
        )
    gone = [part for part in PARTS if part not in parts]
    if gone:
        notes.append(f"left out: parts {', '.join(gone)}: not asked for")
    if missing := thinness.left_out():
        notes.append(f"LEFT OUT to end within {limits.budget_s:g} s: {'; '.join(missing)}")
    return notes
