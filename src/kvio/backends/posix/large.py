"""Transfer one large block by several threads, in segments.

It pays where the bytes are copied on their way: direct I/O through bounce buffers copies one
segment while another is transferred.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kvio import _native
from kvio._native import lib
from kvio._native.signals import reraise
from kvio.backends.posix.engine import IF_EXISTS, Engine
from kvio.types import Cancellation, IfExists, KiB, Parts, Receipt

_MIN_SEGMENTS = 2
#: A bounce buffer holds a segment, and room for padding, trailer and an unaligned start.
_SPARE = 64 * KiB


class Settings(NamedTuple):
    """The settings that all calls for the ranges of a block share."""

    flags: int
    if_exists: int
    verify: str
    cancel: Cancellation


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
    """Write one block in segments, or raise why not."""
    cancel = cancel or Cancellation()
    segments = partial(_write_segments, engine, if_exists, cancel)
    return engine.write_one(key, parts, nbytes, if_exists, cancel, function=segments)


def read(engine: Engine, key: str, parts: Parts, nbytes: int, cancel: Cancellation | None) -> int:
    """Read one whole block in segments, or raise why not."""
    cancel = cancel or Cancellation()
    segments = partial(_read_segments, engine, cancel)
    return engine.read_one(key, parts, nbytes, cancel, function=segments)


def _write_segments(
    engine: Engine,
    if_exists: IfExists,
    cancel: Cancellation,
    call: Any,
    ops: Any,
    _count: int,
) -> int:
    """Do what ``kvio_write_batch`` does for one operation, in segments."""
    op = ops + 0  # a pointer, whether an array or an operation was given
    op.fd = -1
    try:
        begun = lib.kvio_write_begin(call, op)
        if begun:
            return int(begun == 1)
        op.status = -errno.ECANCELED  # until all of it is written
        *cuts, last = _cuts(op.nbytes, engine.options.segment_bytes)
        settings = Settings(engine.write_flags, IF_EXISTS[if_exists], "full", cancel)
        status = _run_ranges(engine, lib.kvio_write_range, settings, op, cuts)
        if status == 0:
            crc = _native.ffi.new("uint32_t *", op.crc)
            status = lib.kvio_write_range(call, op, *last, crc)
            op.crc = crc[0]
        op.status = status
        if status == 0:
            return int(lib.kvio_write_end(call, op) == 0)
        op.site = lib.KVIO_SITE_WRITE
        return 0
    finally:
        lib.kvio_write_abort(call, op)  # drops a temporary that is still there


def _read_segments(engine: Engine, cancel: Cancellation, call: Any, ops: Any, _count: int) -> int:
    """Do what ``kvio_read_batch`` does for one operation, in segments."""
    op = ops + 0
    op.fd = -1
    try:
        if lib.kvio_read_begin(call, op) < 0:
            return 0
        op.status = -errno.ECANCELED  # until all of it is read
        stored = op.crc
        settings = Settings(engine.flags, 0, engine.options.verify, cancel)
        cuts = _cuts(op.nbytes, engine.options.segment_bytes)
        status = _run_ranges(engine, lib.kvio_read_range, settings, op, cuts)
    finally:
        lib.kvio_read_end(call, op)
    checked = engine.options.verify == "full" and op.flags & lib.KVIO_OP_HAS_CHECKSUM
    if status == 0 and checked and op.crc != stored:
        status, op.site = lib.KVIO_CORRUPT, lib.KVIO_BAD_PAYLOAD
    elif status == lib.KVIO_CORRUPT:
        op.site = lib.KVIO_BAD_SHORT
    elif status:
        op.site = lib.KVIO_SITE_READ
    op.status = status
    return int(status == 0)


def _run_ranges(
    engine: Engine, function: Any, settings: Settings, op: Any, cuts: list[tuple[int, int]]
) -> int:
    """Transfer consecutive ranges at once, and combine their checksums into op.crc."""
    tasks: list[Callable[[], tuple[int, int]]] = [
        partial(_run_range, engine, function, settings, op, start, length) for start, length in cuts
    ]
    answers = engine.run_all(tasks)
    op.crc = _native.crc32c_combine(
        (crc, length) for (_, crc), (_, length) in zip(answers, cuts, strict=True)
    )
    return next((status for status, _ in answers if status < 0), 0)


def _run_range(
    engine: Engine, function: Any, settings: Settings, op: Any, start: int, nbytes: int
) -> tuple[int, int]:
    bounce = engine.bounce.take() if op.mode_taken == lib.KVIO_MODE_DIRECT else None
    try:
        call = engine.make_call(*settings, bounce)
        crc = _native.ffi.new("uint32_t *")
        status = function(call, op, start, nbytes, crc)
        reraise()
        return status, crc[0]
    except BaseException:
        settings.cancel.request()
        raise
    finally:
        if bounce is not None:
            engine.bounce.give(bounce)


def _cuts(nbytes: int, segment_bytes: int) -> list[tuple[int, int]]:
    """Split [0, nbytes) into (start, length) pieces that fit a bounce buffer; at least one."""
    step = max(segment_bytes - _SPARE, _SPARE)
    return [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)] or [(0, 0)]


def _is_aligned(engine: Engine, parts: Parts) -> bool:
    memory, offset = engine.medium.memory_align, engine.medium.offset_align
    addresses = [_native.address_of(part) for part in parts if len(part)]
    return all(address % memory == 0 for address in addresses) and all(
        len(part) % offset == 0 for part in parts[:-1]
    )
