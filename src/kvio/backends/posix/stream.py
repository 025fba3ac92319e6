"""Write one block from a stream, piece by piece.

The format has the length and checksum behind the payload, so they need not be known before.
"""

from __future__ import annotations

import errno
from typing import Any

from kvio import _native
from kvio._native import lib
from kvio._native.signals import reraise
from kvio.abc import Source
from kvio.backends.posix import outcome
from kvio.backends.posix.engine import Engine
from kvio.buffers import aligned
from kvio.errors import storage_error
from kvio.types import Blocks, IfExists, Receipt

_STALE = -errno.ESTALE


def write(
    engine: Engine, key: str, source: Source, nbytes: int | None, at_least: int, if_exists: IfExists
) -> Receipt:
    """Write one block, or raise its error; see `kvio.abc.Backend.write_stream`."""
    concurrency = engine.counters.in_flight + 1
    mode, reason = engine.for_write(nbytes or at_least, concurrency)
    stream = _Stream(engine, key, source, nbytes)
    ops = engine.run(
        stream.run,
        Blocks((key,), ((),), (nbytes or 0,)),
        (mode,),
        engine.write_flags,
        op_flags=lib.KVIO_OP_STREAM,
        create=True,
        if_exists=if_exists,
    )
    error = engine.root_error(ops, key)
    if error is not None:
        raise error
    (answer,) = ops.answers()
    if answer.status:
        raise outcome.error_of(answer, key, stream.nbytes, 0, engine.name)
    known = engine.for_write(stream.nbytes, concurrency)
    reason = known[1] if known[0] == mode else reason
    return outcome.receipt_of(
        answer, key, stream.nbytes, engine.level, reason, checksum=engine.checksum
    )


class _Stream:
    """Does what ``kvio_write_batch`` does for one operation, from a stream.

    Attributes:
        nbytes: the length if it is known, else the number of bytes so far.
    """

    def __init__(self, engine: Engine, key: str, source: Source, nbytes: int | None) -> None:
        self._engine = engine
        self._key = key
        self._source = source
        self._length = nbytes
        self._buffer = aligned(engine.options.segment_bytes)
        self._begun = False
        self._status = 0
        self.nbytes = nbytes or 0

    def run(self, call: Any, ops: Any, _count: int) -> int:
        """Write and publish the block."""
        if self._begun:  # a retry, but bytes of the source are gone
            removed = self._status == _STALE
            doing = "publish in a directory that was removed meanwhile" if removed else "publish"
            raise storage_error(-self._status, doing, key=self._key, backend=self._engine.name)
        op = ops + 0
        op.fd = -1
        try:
            begun = lib.kvio_write_begin(call, op)
            if begun:
                return int(begun == 1)
            self._begun = True
            op.status = -errno.ECANCELED  # until all of it is written
            op.status = self._write(call, op)
            if op.status == 0:
                return int(lib.kvio_write_end(call, op) == 0)
            op.site = lib.KVIO_SITE_WRITE
            return 0
        finally:
            self._status = int(op.status)
            lib.kvio_write_abort(call, op)  # drops a temporary that is still there

    def _write(self, call: Any, op: Any) -> int:
        """Write the bytes of the source and the trailer; return 0 or -errno."""
        part = _native.new("kvio_part[1]")
        view = _native.from_buffer(self._buffer)
        crc = _native.new("uint32_t *")
        op.parts, op.nparts, op.offset = part, 1, 0
        part[0].base = view
        try:
            while True:
                part[0].nbytes = got = self._next(op.offset)
                end = op.offset + got
                last = got < len(self._buffer) or end == self._length
                op.nbytes = end if last else end + 1  # one more, to say that others follow
                status: int = lib.kvio_write_range(call, op, op.offset, got, crc)
                reraise()
                if status or last:
                    break
                op.offset = end
        finally:
            _native.release(view)
        op.crc, op.offset, self.nbytes = crc[0], 0, op.nbytes
        return status

    def _next(self, start: int) -> int:
        """Fill the buffer from the source until it ends; return the number of bytes."""
        rest = len(self._buffer) if self._length is None else self._length - start
        room = self._buffer[:rest]
        got = 0
        while got < len(room):
            count = self._source(room[got:])
            if not count:
                break
            got += count
        return got
