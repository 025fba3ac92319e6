"""Run the KV-cache benchmark on kvio: ``python -m kvio.connectors.mlperf_kv --help``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import kvio
from kvio.connectors.mlperf_kv.backend import Counts, KvioBackend
from kvio.connectors.mlperf_kv.program import Program, load
from kvio.errors import ConfigError, KvioError
from kvio.types import GiB

PROGRAM: Final = "KVIO_MLPERF_KV"
STORE: Final = "KVIO_MLPERF_KV_STORE"
#: Of freed memory; entries are long, and a read would wait for the kernel to zero new pages.
KEPT_MEMORY: Final = "512MiB"
#: Of one system call, unless the URL says otherwise. Users read all the time, and a write waits
#: for what their reads have queued at the device: with the 16 MiB of other stores twice as long.
CHUNK: Final = "2MiB"
#: How long calls that the program left behind may take to end.
_CLOSE_S: Final = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, say what went through kvio, and return the exit status.

    That of the program; 1 if the store failed, which the program itself passes over in silence,
    or if it made no storage tier.
    """
    given = _parse(sys.argv[1:] if arguments is None else list(arguments))
    try:
        return run(
            load(given.program),
            given.arguments,
            store=given.store,
            stage=given.stage,
            durability=given.durability,
            cold_reads=not given.warm_reads,
            keep_memory=given.keep_memory,
        )
    except KvioError as exc:
        sys.stderr.write(f"[KVIO] {exc}\n")
        return 2


def run(
    program: Program,
    arguments: Sequence[str],
    *,
    store: str,
    stage: str | None = None,
    durability: str | None = None,
    cold_reads: bool = True,
    keep_memory: str = KEPT_MEMORY,
) -> int:
    """Run a loaded program with a store as its storage tier, and return the exit status.

    Raises:
        KvioError: the store cannot be opened, or not closed.
    """
    kvio.keep_freed_memory(keep_memory)
    made: list[tuple[KvioBackend, str]] = []
    with ExitStack() as stack:

        def make(base_path: str | os.PathLike[str] | None = None) -> KvioBackend:
            opened = stack.enter_context(
                _opened(store, base_path, stage=stage, durability=durability)
            )
            backend = KvioBackend(opened, cold_reads=cold_reads, timing=program.timing)
            made.append((backend, repr(opened)))
            return backend

        program.use(make)
        status = program.run(list(arguments))
    for backend, where in made:
        sys.stdout.write(f"[KVIO] {where}: {describe(backend.counts, cold_reads=cold_reads)}\n")
    if not made:
        sys.stderr.write("[KVIO] the program made no storage tier: nothing went through kvio\n")
    failed = not made or any(backend.counts.failed for backend, _ in made)
    return status or int(failed)


def describe(counts: Counts, *, cold_reads: bool) -> str:
    """Describe in one line what went through a backend."""
    text = (
        f"wrote {counts.written_blocks} entries ({counts.written_bytes / GiB:.2f} GiB), "
        f"read {counts.read_blocks} ({counts.read_bytes / GiB:.2f} GiB, "
        f"{'cold' if cold_reads else 'as cached'}), deleted {counts.deleted_blocks}, "
        f"not found {counts.missing}, failed {counts.failed}"
    )
    return f"{text}; the first failure: {counts.first_failure}" if counts.failed else text


@contextmanager
def _opened(
    name: str,
    base_path: str | os.PathLike[str] | None,
    *,
    stage: str | None,
    durability: str | None,
) -> Iterator[kvio.BlockStore]:
    """Open the store, in the program's ``--cache-dir`` where it is a backend's name alone."""
    with ExitStack() as stack:
        root: str | None = None
        bare = "://" not in name and "/" not in name
        if bare and (name.startswith("posix-") or name == "hybrid"):
            root = os.fspath(base_path) if base_path is not None else _scratch(stack)
        elif base_path is not None:
            raise ConfigError(
                f"--store {name} and --cache-dir {os.fspath(base_path)} name two places; give "
                "one, or --store hybrid to use the directory"
            )
        opened: kvio.BlockStore = kvio.open_store(
            name,
            root=root,
            create=root is not None,
            durability=durability,  # type: ignore[arg-type]  # open_store checks it
            options={"chunk_bytes": CHUNK} if _is_file_store(name, "chunk_bytes") else None,
        )
        if stage is not None:
            assert isinstance(opened, kvio.Store)
            opened = kvio.stage(opened, stage, close_store=True)
        try:
            yield opened
        finally:
            opened.close(timeout=_CLOSE_S)


def _scratch(stack: ExitStack) -> str:
    """Return a directory that is removed at the end, as the program's own tier has."""
    return os.path.join(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv_cache_")), "kv")


def _parse(arguments: list[str]) -> argparse.Namespace:
    own, theirs = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, theirs = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m kvio.connectors.mlperf_kv",
        usage="%(prog)s [options] -- ARGUMENTS OF THE PROGRAM",
        description="Run MLCommons' KV-cache benchmark with a kvio store as its storage tier.",
    )
    parser.add_argument(
        "--program",
        type=Path,
        default=os.environ.get(PROGRAM) or None,
        metavar="FOLDER",
        help=f"the folder kv_cache_benchmark; default: ${PROGRAM}",
    )
    parser.add_argument(
        "--store",
        default=os.environ.get(STORE) or None,
        metavar="URL",
        help="a store's URL or path; or posix-tmpfile, posix-direct or hybrid alone, in the "
        f"program's --cache-dir; default: ${STORE}",
    )
    parser.add_argument(
        "--durability",
        choices=("durable", "visible"),
        help="default: that of the URL, else durable for files, as the program's own tier syncs "
        "every entry",
    )
    parser.add_argument(
        "--stage", metavar="SIZE", help="put a staging tier of this size in front of the store"
    )
    parser.add_argument(
        "--warm-reads",
        action="store_true",
        help="leave entries in the page cache; the program's own tier drops them before reads",
    )
    parser.add_argument(
        "--keep-memory",
        default=KEPT_MEMORY,
        metavar="SIZE",
        help="freed memory of entries that is kept for the next reads (default: %(default)s)",
    )
    given = parser.parse_args(own)
    given.arguments = theirs
    for option, variable in (("program", PROGRAM), ("store", STORE)):
        if not getattr(given, option):
            parser.error(f"give --{option}, or set {variable}")
    if given.durability is None and _is_file_store(given.store, "durability"):
        given.durability = "durable"
    return given


def _is_file_store(name: str, option: str) -> bool:
    """Return whether a store keeps files, and its URL leaves an option to us."""
    scheme = name.partition("://")[0] if "://" in name else "hybrid" if "/" in name else name
    return (scheme == "hybrid" or scheme.startswith("posix-")) and f"{option}=" not in name


if __name__ == "__main__":
    sys.exit(main())
