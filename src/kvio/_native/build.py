"""How cffi builds the C core; run by setuptools (setup.py), never at run time."""

from __future__ import annotations

from pathlib import Path

import cffi

HERE = Path("src/kvio/_native")
SOURCES = (
    "blake2b.c",
    "cache.c",
    "columns.c",
    "crc32c.c",
    "directory.c",
    "dirs.c",
    "existing.c",
    "file.c",
    "look.c",
    "numa.c",
    "parts.c",
    "pool.c",
    "publish.c",
    "python.c",
    "read.c",
    "recent.c",
    "shared.c",
    "signals.c",
    "staging.c",
    "trailer.c",
    "transfer.c",
    "write.c",
)
HEADERS = ("crc32c_tables.h", "kvio.cdef.h", "kvio.h", "sys.h", "transfer.h")

ffibuilder = cffi.FFI()
ffibuilder.cdef((Path(__file__).parent / "kvio.cdef.h").read_text(encoding="ascii"))
ffibuilder.cdef('extern "Python" int kvio_run_handlers(void);')
ffibuilder.set_source(
    "kvio._native._core",
    '#include "kvio.h"',
    sources=[str(HERE / name) for name in SOURCES],
    depends=[str(HERE / name) for name in HEADERS],
    include_dirs=[str(HERE)],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
)
