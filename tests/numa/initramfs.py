"""A root file system in memory that holds this Python, kvio as it is here, and a first program."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import _cffi_backend

import kvio

#: Where the guest finds kvio and this package.
PACKAGES: Final = "/packages"
#: Parts of the standard library that the guest has no use for, and the largest.
_LEFT_OUT: Final = frozenset(
    {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter"}
)
_SUFFIXES: Final = (".py", ".so", f"{sys.implementation.cache_tag}.pyc")
_FIRST_PROGRAM: Final = f"""\
import sys

sys.path.insert(0, "{PACKAGES}")
from tests.numa import inside

inside.main()
"""


def write_initramfs(path: Path) -> None:
    """Write a compressed archive from which a kernel runs `tests.numa.inside`.

    Files of Python and libraries have the paths they have here.
    """
    python = os.path.realpath(sys.executable)
    files = {name: Path(name) for name in (python, *_standard_library())}
    for package in (Path(kvio.__file__).parent, Path(__file__).parent):
        place = PACKAGES if package.name == "kvio" else f"{PACKAGES}/tests"
        files |= {f"{place}/{name.relative_to(package.parent)}": name for name in _code(package)}
    backend = Path(_cffi_backend.__file__)
    files[f"{PACKAGES}/{backend.name}"] = backend
    programs = [source for source in files.values() if source.suffix not in (".py", ".pyc")]
    files |= {name: Path(name) for name in _libraries(programs)}
    first = f"#!{python} -S\n{_FIRST_PROGRAM}".encode()
    with gzip.open(path, "wb", compresslevel=1) as archive:
        for entry in _archive(files, {"/init": first, f"{PACKAGES}/tests/__init__.py": b""}):
            archive.write(entry)


def _standard_library() -> Iterator[str]:
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for folder in folders:
        # The second is the environment's own, and may be empty.
        base = Path(folder.replace(sys.prefix, sys.base_prefix, 1))
        yield from map(str, _code(base))


def _code(folder: Path) -> Iterator[Path]:
    for place, below, names in os.walk(folder):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        yield from (Path(place, name) for name in names if name.endswith(_SUFFIXES))


def _libraries(programs: Iterable[Path]) -> set[str]:
    """Ask the loader which libraries programs need, with those that these need."""
    command = ["ldd", *map(str, programs)]
    reported = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"^\t(?:.* => )?(/\S+) \(0x", reported, re.MULTILINE))


def _archive(files: dict[str, Path], texts: dict[str, bytes]) -> Iterator[bytes]:
    """Make the entries of an archive in the form "newc": cpio(5)."""
    # Modification times are kept, as Python compares them with its compiled files.
    entries = {name: (0o100755, int(source.stat().st_mtime)) for name, source in files.items()}
    entries |= dict.fromkeys(texts, (0o100755, 0))
    for name in (*entries, "/dev/x", "/disk/x", "/proc/x", "/sys/x", "/tmp/x"):
        for parent in list(Path(name).parents)[:-1]:
            entries.setdefault(str(parent), (0o40755, 0))
    for number, name in enumerate(sorted(entries), 1):  # a directory before what is in it
        data = files[name].read_bytes() if name in files else texts.get(name, b"")
        yield _entry(number, name.lstrip("/"), *entries[name], data)
    yield _entry(0, "TRAILER!!!", 0, 0, b"")


def _entry(number: int, name: str, mode: int, modified: int, data: bytes) -> bytes:
    links, owner, device = 1, (0, 0), (0, 0, 0, 0)
    size = len(name.encode()) + 1
    fields = (number, mode, *owner, links, modified, len(data), *device, size, 0)
    head = b"070701" + b"".join(b"%08X" % value for value in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
