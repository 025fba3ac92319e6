"""The fast path: one block in one piece of memory by one thread, with no deadline.

It does what `Engine.run` does for a batch, without lists, and with the request as plain arguments.
A whole block that is read through the page cache needs less: `fast_reads`, a single C function,
which a store calls itself.
"""

from __future__ import annotations

import errno
from functools import partial
from time import monotonic
from typing import Any, Final

from kvio._native import NULL, lib, run_one
from kvio._native.ops import Answer, FastReads, One, address
from kvio._native.signals import raised, reraise
from kvio.backends.posix import large, outcome
from kvio.backends.posix.directories import split_key
from kvio.backends.posix.engine import BOUNCING, IF_EXISTS, LOOK, Engine
from kvio.types import IfExists, Receipt

_STALE: Final = -errno.ESTALE


class Quick:
    """The single calls of an engine; the C core's settings are made once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._root = engine.root
        self._writes = {
            name: self._one(engine.make_call(engine.write_flags, name), lib.KVIO_WRITE)
            for name in IF_EXISTS
        }
        self._read, self._stat = (
            self._one(engine.make_call(engine.flags, verify=engine.options.verify), kind)
            for kind in (lib.KVIO_READ, lib.KVIO_STAT)
        )
        self._fixed = engine.fixed
        self._hashed = engine.leaf_table is not None

    def _one(self, call: Any, kind: int) -> One:
        return One(call, self._engine.counters, self._engine.leaf_table, kind)

    def write(self, key: str, part: memoryview, if_exists: IfExists) -> Receipt | None:
        """Write a block; None: the engine must run the slow path.

        Raises:
            KvioError: the write failed; nothing is visible.
        """
        engine, one = self._engine, self._writes[if_exists]
        nbytes = len(part)
        mode, reason = self._fixed or engine.for_write(nbytes, engine.counters.in_flight + 1)
        if mode in BOUNCING and large.helps_write(engine, [part], nbytes):
            return None
        answer = _checked(self._run(one, key, part, mode), key, nbytes, engine.name)
        if one.call.publish > engine.publish:
            engine.publish = one.call.publish
        if answer is None:
            return None
        if monotonic() >= self._root.due_s:
            self._root.check(key)
        return outcome.receipt_of(
            answer, key, nbytes, engine.level, reason, checksum=engine.checksum
        )

    def fast_reads(self) -> FastReads | None:
        """Return the reads of whole blocks through the page cache; None: there are none."""
        limit_bytes = self._engine.buffered_below
        if not self._hashed or not limit_bytes:
            return None
        return FastReads(self._read, limit_bytes, partial(_bytes_read, self._engine.name))

    def read(self, key: str, part: memoryview) -> int | None:
        """Read a whole block; None: the engine must run the slow path.

        Raises:
            KvioError: there is no block, or it is corrupt, or it does not fit.
        """
        engine = self._engine
        mode, _ = self._fixed or engine.for_read(len(part), engine.counters.in_flight + 1)
        if mode in BOUNCING and large.helps_read(engine, [part], len(part)):
            return None
        return _bytes_read(engine.name, self._run(self._read, key, part, mode), key, len(part))

    def stat(self, key: str) -> Answer | None:
        """Read the trailer of a block; None: the engine must run the slow path.

        Raises:
            KvioError: there is no block, or it is corrupt.
        """
        return _checked(self._run(self._stat, key, None, LOOK), key, 0, self._engine.name)

    def _run(self, one: One, key: str, part: memoryview | None, mode: int) -> Any:
        """Return what `run_one` does, or None: the directory of the key is not open."""
        engine = self._engine
        directory, name = 0, key
        if not self._hashed:
            path, name = split_key(key)
            kept = engine.directories.find(path, create=one not in (self._read, self._stat))
            if kept == NULL:
                return None
            directory = address(kept)
        if mode not in BOUNCING:
            return run_one(one.address, mode, directory, name, part, 0, 0)
        bounce = engine.bounce.take()
        try:
            return run_one(
                one.address, mode, directory, name, part, address(bounce.cdata), bounce.nbytes
            )
        finally:
            engine.bounce.give(bounce)


def _checked(found: Any, key: str, nbytes: int, backend: str) -> Answer | None:
    """Return the answer of a call that succeeded; None: the slow path must run it.

    Raises:
        KvioError: it failed.
    """
    if raised:
        reraise()
    if found is None:
        return None
    answer = Answer(*found[:-1])
    if not answer.status:
        return answer
    lacks_descriptor = found[-1] and not answer.flags & lib.KVIO_OP_UNFIT
    if answer.status == _STALE or lacks_descriptor:
        return None  # it is retried; a corrupt existing block is not checked again
    raise outcome.error_of(answer, key, nbytes, 0, backend)


def _bytes_read(backend: str, found: Any, key: str, nbytes: int) -> int | None:
    """Return the count of a read from its count or its answer, as `_checked`."""
    if type(found) is int:
        if raised:
            reraise()
        return found
    answer = _checked(found, key, nbytes, backend)
    return None if answer is None else answer.done
