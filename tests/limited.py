"""Address space that is limited, of a program or of a test: real allocations that really fail."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PRELUDE = """
import asyncio, contextlib, os, pickle, resource, sys
from concurrent.futures import ThreadPoolExecutor
import kvio

MiB = kvio.MiB
soft, hard = resource.getrlimit(resource.RLIMIT_AS)

def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

@contextlib.contextmanager
def at_most(nbytes):
    '''Let the process have so much more address space inside the block.'''
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

def error_of(call):
    '''Return the error of kvio that a call raises.'''
    try:
        result = call()
    except kvio.KvioError as exc:
        return exc
    raise AssertionError(f"no error: {result!r:.80}")

def descriptors():
    return set(os.listdir("/proc/self/fd"))
"""


def run_limited(program: str, *arguments: object) -> None:
    """Run a program in a fresh interpreter; fail with what it said where it ends with an error."""
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Let this process have so much more address space inside the block, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
