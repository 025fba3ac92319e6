"""Transfer one large block by several threads, in segments.

It pays where the bytes are copied on their way: direct I/O through bounce buffers copies one
segment while another is transferred.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

from kvio import _native
from kvio._native import lib
from kvio._native.signals import reraise
from kvio.backends.posix.engine import Engine
from kvio.types import Cancellation, IfExists, KiB, Parts, Receipt

_MIN_SEGMENTS = 2
#: A bounce buffer holds a segment, and room for padding, trailer and an unaligned start.
_SPARE = 64 * KiB


def helps_write(engine: Engine, parts: Parts, nbytes: int) -> bool:
    """Return whether a block should be written in segments."""
    return (
        nbytes >= _MIN_SEGMENTS * engine.options.segment_bytes
        and engine.for_write(nbytes, 1)[0] == lib.KVIO_MODE_DIRECT
        and not _is_aligned(engine, parts)
    )


def helps_read(engine: Engine, parts: Parts, nbytes: int) -> bool:
    """Return whether a block should be read in segments."""
    return (
        nbytes >= _MIN_SEGMENTS * engine.options.segment_bytes
        and engine.for_read(nbytes, 1)[0] != lib.KVIO_MODE_BUFFERED
        and not _is_aligned(engine, parts)
    )


def write(
    engine: Engine,
    key: str,
    parts: Parts,
    nbytes: int,
    if_exists: IfExists,
    cancel: Cancellation | None,
) -> Receipt:
    """Write one block in segments, or raise its error."""
    cancel = cancel or Cancellation()
    steps = _SegmentedWrite(engine, if_exists, cancel)
    return engine.write_one(key, parts, nbytes, if_exists, cancel, steps=steps)


def read(engine: Engine, key: str, parts: Parts, nbytes: int, cancel: Cancellation | None) -> int:
    """Read one whole block in segments, or raise its error."""
    cancel = cancel or Cancellation()
    return engine.read_one(key, parts, nbytes, cancel, steps=_SegmentedRead(engine, cancel))


class _SegmentedWrite:
    """The steps of a write: all segments but the last at once, the last with the trailer."""

    def __init__(self, engine: Engine, if_exists: IfExists, cancel: Cancellation) -> None:
        self._engine = engine
        self._if_exists: IfExists = if_exists
        self._cancel = cancel

    def transfer(self, call: Any, op: Any) -> None:
        engine = self._engine
        op.fd = -1
        try:
            if lib.kvio_write_begin(call, op):
                return  # the existing block was kept, or the write failed
            op.status = -errno.ECANCELED  # until all of it is written
            *cuts, last = _cuts(op.nbytes, engine.options.segment_bytes)
            make_call = partial(
                engine.make_call, engine.write_flags, self._if_exists, cancel=self._cancel
            )
            run = partial(_run_range, engine, lib.kvio_write_range, make_call, op)
            status = _run_ranges(engine, run, op, cuts, self._cancel)
            if status == 0:
                crc = _native.ffi.new("uint32_t *", op.crc)
                status = lib.kvio_write_range(call, op, *last, crc)
                op.crc = crc[0]
            op.status = status
            if status == 0:
                lib.kvio_write_end(call, op)
            else:
                op.site = lib.KVIO_SITE_WRITE
        finally:
            lib.kvio_write_abort(call, op)  # drops a temporary that is still there


class _SegmentedRead:
    """The steps of a read: all segments at once, then the check of the joined checksum."""

    def __init__(self, engine: Engine, cancel: Cancellation) -> None:
        self._engine = engine
        self._cancel = cancel

    def transfer(self, call: Any, op: Any) -> None:
        engine, verify = self._engine, self._engine.options.verify
        op.fd = -1
        try:
            if lib.kvio_read_begin(call, op) < 0:
                return
            op.status = -errno.ECANCELED  # until all of it is read
            stored = op.crc
            make_call = partial(engine.make_call, engine.flags, verify=verify, cancel=self._cancel)
            run = partial(_run_range, engine, lib.kvio_read_range, make_call, op)
            cuts = _cuts(op.nbytes, engine.options.segment_bytes)
            status = _run_ranges(engine, run, op, cuts, self._cancel)
        finally:
            lib.kvio_read_end(call, op)
        checked = verify == "full" and op.flags & lib.KVIO_OP_HAS_CHECKSUM
        if status == 0 and checked and op.crc != stored:
            status, op.site = lib.KVIO_CORRUPT, lib.KVIO_BAD_PAYLOAD
        elif status == lib.KVIO_CORRUPT:
            op.site = lib.KVIO_BAD_SHORT
        elif status:
            op.site = lib.KVIO_SITE_READ
        op.status = status


def _run_ranges(
    engine: Engine,
    run: Callable[[int, int], tuple[int, int]],
    op: Any,
    cuts: list[tuple[int, int]],
    cancel: Cancellation,
) -> int:
    """Transfer consecutive ranges at once, and combine their checksums into op.crc."""

    def task(start: int, nbytes: int) -> tuple[int, int]:
        try:
            return run(start, nbytes)
        except BaseException:
            cancel.request()  # the others stop
            raise

    answers = engine.run_all([partial(task, *cut) for cut in cuts])
    op.crc = _native.crc32c_combine(
        (crc, length) for (_, crc), (_, length) in zip(answers, cuts, strict=True)
    )
    return next((status for status, _ in answers if status < 0), 0)


def _run_range(
    engine: Engine,
    function: Any,
    make_call: Callable[..., Any],
    op: Any,
    start: int,
    nbytes: int,
) -> tuple[int, int]:
    """Transfer one range; return its status and checksum."""
    bounce = engine.bounce.take() if op.mode_taken == lib.KVIO_MODE_DIRECT else None
    try:
        crc = _native.ffi.new("uint32_t *")
        status = function(make_call(bounce=bounce), op, start, nbytes, crc)
        reraise()
        return status, crc[0]
    finally:
        if bounce is not None:
            engine.bounce.give(bounce)


def _cuts(nbytes: int, segment_bytes: int) -> list[tuple[int, int]]:
    """Split [0, nbytes) into (start, length) pieces that fit a bounce buffer; at least one."""
    step = max(segment_bytes - _SPARE, _SPARE)
    return [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)] or [(0, 0)]


def _is_aligned(engine: Engine, parts: Parts) -> bool:
    memory, offset = engine.fs.memory_align, engine.fs.offset_align
    addresses = [_native.address_of(part) for part in parts if len(part)]
    return all(address % memory == 0 for address in addresses) and all(
        len(part) % offset == 0 for part in parts[:-1]
    )
