"""The fast path: one block in one piece of memory by one thread, with no deadline.

It does what `Engine.run` does for a batch, without lists, and with the request as plain arguments:
a 4 KiB read costs 3 us more than the system calls, not 14 (two cores, Linux 6.18, tmpfs).
"""

from __future__ import annotations

import errno
from time import monotonic
from typing import Any, Final

from kvio._native import NULL, lib
from kvio._native.ops import Answer, read_answer, run_one
from kvio.backends.posix import large, outcome
from kvio.backends.posix.engine import IF_EXISTS, Engine
from kvio.backends.posix.layout import split_key
from kvio.backends.posix.modes import BOUNCING
from kvio.types import IfExists, Receipt

_STALE: Final = -errno.ESTALE


class Quick:
    """The C settings of an engine's single calls, made once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._root = engine.root
        self._write_calls = {
            name: engine.make_call(engine.write_flags, IF_EXISTS[name], "full", None, None)
            for name in IF_EXISTS
        }
        self._fixed = engine.fixed
        self._read_call = engine.make_call(engine.flags, 0, engine.options.verify, None, None)

    def write(self, key: str, part: memoryview, if_exists: IfExists) -> Receipt | None:
        """Write a block; None: the engine must run the slow path.

        Raises:
            KvioError: the write failed; nothing is visible.
        """
        engine = self._engine
        nbytes = len(part)
        mode, reason = self._fixed or engine.for_write(nbytes, engine.counters.in_flight + 1)
        if mode in BOUNCING and large.helps_write(engine, [part], nbytes):
            return None
        op = self._run(lib.kvio_write_one, self._write_calls[if_exists], key, part, mode)
        answer = self._answer(op, key, nbytes)
        if answer is None:
            return None
        if monotonic() >= self._root.due_s:
            self._root.check(key)
        return outcome.receipt_of(
            answer, key, nbytes, engine.level, reason, checksum=engine.checksum
        )

    def read(self, key: str, part: memoryview) -> int | None:
        """Read a whole block; None: the engine must run the slow path.

        Raises:
            KvioError: there is no block, or it is corrupt, or it does not fit.
        """
        engine = self._engine
        mode, _ = self._fixed or engine.for_read(len(part), engine.counters.in_flight + 1)
        if mode in BOUNCING and large.helps_read(engine, [part], len(part)):
            return None
        op = self._run(lib.kvio_read_one, self._read_call, key, part, mode)
        if op is not None and not op.status:
            return int(op.done)
        self._answer(op, key, len(part))
        return None

    def _run(self, function: Any, call: Any, key: str, part: memoryview, mode: int) -> Any:
        engine = self._engine
        kept, name = NULL, key
        if engine.leaf_table is None:
            directory, name = split_key(key)
            kept = engine.directories.find(directory, create=function is lib.kvio_write_one)
            if kept == NULL:
                return None
        bounce = engine.bounce.take() if mode in BOUNCING else None
        try:
            op = run_one(
                function, call, engine.counters, bounce, engine.leaf_table, kept, mode,
                name.encode(), part,
            )  # fmt: skip
        finally:
            if bounce is not None:
                engine.bounce.give(bounce)
        if call.publish > engine.publish:
            engine.publish = call.publish
        return op

    def _answer(self, op: Any, key: str, nbytes: int) -> Answer | None:
        if op is None or op.status == _STALE:
            return None
        if lib.kvio_lacks_descriptor(op) and not op.flags & lib.KVIO_OP_UNFIT:
            return None  # the slow path retries it; a corrupt existing block is not checked again
        answer = read_answer(op)
        if answer.status:
            raise outcome.error_of(answer, key, nbytes, 0, self._engine.name)
        return answer
