"""No file of kvio's is for others even for a moment: the modes with which it is opened, by strace.

Needs strace (Debian package strace) and leave to trace (root, or ptrace_scope 0); the kvio that
opens wide is compiled for the test (Debian packages gcc and libc6-dev).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.faults import mutants
from tests.faults.security.races import ROOT
from tests.faults.totals import Tally
from tests.posix import strace

BEGIN: Final = "/kvio-begin"
#: What makes a name or a file without one.
WATCHED: Final = "trace=openat,openat2,open,creat,mkdir,mkdirat,mknod,mknodat"
_CALL: Final = re.compile(r"\b(openat2?|open|creat|mkdir|mkdirat|mknod|mknodat)\((.*)")
_MODE: Final = re.compile(r"(?:, |mode=)0([0-7]*)(?=[,})\s])")
#: All that kvio stores in, under a umask that takes nothing away.
PROGRAM: Final = f"""
import os, sys
import kvio
from tests.staging.daemon.daemons import serving
os.chdir(sys.argv[1])
os.umask(0)
try:
    os.open({BEGIN!r}, os.O_RDONLY)
except OSError:
    pass
for publish in ("auto", "rename"):
    for layout in ("block", "plain"):
        options = {{"create": True, "publish": publish}}
        root = publish + layout
        with kvio.open_store("posix-tmpfile", root=root, layout=layout, options=options) as store:
            store.write_blocks((f"a{{n}}/b", b"data") for n in range(5))
            store.write_block("a0/b", b"more", if_exists="replace")
            store.write_block("large", bytes(3 << 20))
for seals in (True, False):
    name = f"file{{seals}}"
    with kvio.SharedFile.create(name, 10_000, writers=2, durability="visible") as file:
        file.pwrite(bytes(10_000), 0)
        if seals:
            file.seal()
os.mkdir("spool", 0o700)
with kvio.open_store("posix-tmpfile", root="staged", options={{"create": True}}) as store:
    with serving(store, "1MiB", path="socket") as daemon:
        with kvio.stage(store, daemon=daemon.path, spool="spool") as tier:
            tier.write_block("k", b"data")
            with tier.open("file", "wb") as file:
                file.write(b"data")
            tier.barrier(timeout=60)
"""


class Made(NamedTuple):
    """A file or directory that was made: the call, its mode, and the line of the trace."""

    call: str
    mode: int
    line: str


def made(log: str) -> Iterator[Made]:
    """Yield what was made after the mark."""
    lines = iter(log.splitlines())
    for line in lines:
        if BEGIN in line:
            break
    for line in lines:
        if (found := _CALL.search(line)) is None:
            continue
        call, rest = found.groups()
        if call.startswith("open") and "O_CREAT" not in rest and "O_TMPFILE" not in rest:
            continue
        modes = _MODE.findall(rest.partition(" = ")[0])
        assert modes, f"no mode in {line!r}"
        yield Made(call, int(modes[-1] or "0", 8), line)


def traced(folder: Path, **env: str) -> list[Made]:
    """List what the program makes."""
    log = folder / "strace"
    command = strace.command(log, "-qq", "-e", WATCHED)
    work = folder / "work"
    work.mkdir(mode=0o700)
    command += [f"-E{name}={value}" for name, value in env.items()]
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM, str(work)],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(made(log.read_text(errors="replace")))


def too_wide(found: list[Made]) -> list[str]:
    """Return what was made for others, or with more than its owner needs."""
    return [
        one.line
        for one in found
        if one.mode & ~(0o700 if one.call.startswith("mkdir") else 0o600)
        and "/dev/" not in one.line
    ]


@pytest.mark.slow
def test_nothing_is_opened_for_others(tmp_path: Path) -> None:
    """Temporaries, blocks, maps, spools, locks, directories: never beyond 0600 and 0700."""
    found = traced(tmp_path)

    files = [one for one in found if one.call.startswith("open")]
    print(f"{len(files)} files and {len(found) - len(files)} others")
    assert too_wide(found) == []
    for part in ("O_TMPFILE", ".kvio-tmp-", ".kvio-map", "socket.lock"):
        assert any(part in one.line for one in files), f"nothing of {part} was seen"
    assert len(files) > 30
    assert sum(one.call.startswith("mkdir") for one in found) > 10


@pytest.mark.slow
def test_a_kvio_that_opens_for_all_is_found(tmp_path: Path, tally: Tally) -> None:
    """Temporaries that are made for everybody, and made narrow later, are noticed too."""
    tally.add(mutants=1)
    source = Path(__file__).with_name("careless.c")
    library = mutants.compile_c(source, tmp_path / "careless.so", "-shared", "-fPIC")
    found = too_wide(traced(tmp_path, LD_PRELOAD=str(library), KVIO_CARELESS="wide"))
    tally.add(caught=bool(found))
    assert any(".kvio-tmp-" in line for line in found)
    assert any("O_TMPFILE" in line for line in found)
