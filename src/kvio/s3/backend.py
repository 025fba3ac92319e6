"""Blocks in a bucket: what every S3 backend does, over whatever its library gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Self

from kvio.abc import Backend, RawBlock, RunAll
from kvio.errors import (
    BlockNotFoundError,
    ConfigError,
    KvioError,
    StorageError,
    UnsupportedError,
)
from kvio.s3 import body, sharing
from kvio.s3.asking import Asking, run_in_turn
from kvio.s3.conditions import Refused
from kvio.s3.objects import Connect, Objects, Traits
from kvio.s3.options import S3Options, options_from_url
from kvio.s3.probing import Conditions, Probe
from kvio.s3.raw import RawObject
from kvio.s3.reading import Reader
from kvio.s3.writing import Writer
from kvio.types import (
    BlockResult,
    BlockStat,
    BlockStatus,
    Cancellation,
    Capabilities,
    Finding,
    IfExists,
    Parts,
    Receipt,
    is_key,
    status_of,
)
from kvio.url import StoreURL

#: Lookups that are under way at once.
_LOOKS: Final = 16


class S3Backend(Backend):
    """Blocks as objects below one prefix; a registered backend adds its library and nothing else.

    Thread-safe. A forked child opens anew, or is refused where its library would hang.
    """

    #: Makes the library's client; a class, so that it is no method here.
    library: ClassVar[Connect]
    traits: ClassVar[Traits]

    def __init__(self, options: S3Options) -> None:
        self.options = options
        self._check_options(options)
        self._run_all: RunAll = run_in_turn
        self._refused = False
        self._renew()
        self._ask(self._objects.check_bucket, f"open the bucket {options.bucket!r}")

    @classmethod
    def from_url(cls, url: StoreURL) -> Self:
        try:
            return cls(options_from_url(url))
        except BlockNotFoundError as exc:
            raise ConfigError(f"{url.scheme}://{url.host}: there is no such bucket") from exc
        except StorageError as exc:
            if type(exc) is StorageError and isinstance(exc.__cause__, Exception):
                raise ConfigError(str(exc)) from exc
            raise

    def _check_options(self, options: S3Options) -> None:
        default = S3Options(bucket=options.bucket)
        for option, why, values in self.traits.ignores:
            value = getattr(options, option)
            if value in values or (not values and value != getattr(default, option)):
                raise ConfigError(f"{self.name} cannot honour the option {option!r}: {why}")

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._ask = Asking(self.name, self.options.retries)
        self._reader = Reader(self.options, self._ask, self._side_by_side)
        self._writer = Writer(self.options, self._ask, self._reader, self._side_by_side)
        self._conditions = Conditions(self.options, self._ask)
        self._lock = threading.Lock()
        self._connected: Objects | None = None

    @property
    def _objects(self) -> Objects:
        """The library's client of this process, made when it is first needed."""
        connected = self._connected
        if connected is not None and self._pid == os.getpid():
            return connected
        if self._pid != os.getpid():
            self.after_fork()
        if self._refused:
            raise UnsupportedError(
                f"{self.name} does not survive a fork: its library hangs in the child; start "
                "children with multiprocessing's 'spawn' or 'forkserver'"
            )
        with self._lock:
            if self._connected is None:
                self._connected = sharing.take(type(self).library, self.options)
            return self._connected

    def _side_by_side(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        return self._run_all(tasks)

    @property
    def capabilities(self) -> Capabilities:
        options, traits = self.options, self.traits
        exclusive = self._conditions.hold(self._objects)
        notes = []
        if not traits.conditional:
            notes.append("the library sends no If-None-Match: of two writers both may succeed")
        elif not exclusive:
            notes.append(
                "the server does not honour If-None-Match: of two writers both may succeed"
            )
        if traits.after_fork == "refuse":
            notes.append("not usable in a forked child: start children by spawn")
        where = options.endpoint_url or f"AWS {options.region}"
        return Capabilities(
            atomic_write=True,
            exclusive_create=exclusive,
            durable_write=True,
            checksum=options.layout == "block" and options.checksum == "crc32c",
            shared=True,
            raw_blocks=True,
            usable_after_fork=traits.after_fork == "reopen",
            publish="PUT, CompleteMultipartUpload",
            medium=f"S3 at {where}, by {self.name}",
            notes=tuple(notes),
        )

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        if cancel is not None:  # a request that is given up goes on, and its caller too
            parts = [memoryview(body.join(parts))]
        objects = self._objects
        return self._writer.write(
            objects,
            key,
            parts,
            if_exists=if_exists,
            conditional=if_exists != "replace" and self._conditions.hold(objects),
            cancel=cancel,
        )

    def read_block_into(
        self,
        key: str,
        parts: Parts,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        cancel: Cancellation | None = None,
    ) -> int:
        if offset or nbytes is not None:
            room = sum(map(len, parts))
            wanted = room if nbytes is None else min(nbytes, room)
            return self._reader.part(self._objects, key, parts, offset, wanted, cancel)
        return self._reader.whole(self._objects, key, parts, cancel)

    def read_block(self, key: str, *, cancel: Cancellation | None = None) -> memoryview | None:
        return self._reader.fresh(self._objects, key, cancel)

    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        return self._reader.stat(self._objects, key, cancel)

    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        check = self._reader.scrub if payload else self._reader.nbytes
        try:
            return BlockResult(key, BlockStatus.OK, check(self._objects, key, cancel))
        except KvioError as exc:
            return BlockResult(key, status_of(exc), 0, exc)

    def count_leading(self, keys: Sequence[str], *, cancel: Cancellation | None = None) -> int:
        for at in range(0, len(keys), _LOOKS):
            group = keys[at : at + _LOOKS]
            tasks = [partial(self._reader.exists, self._objects, key, cancel) for key in group]
            there = self._side_by_side(tasks)
            if not all(there):
                return at + there.index(False)
        return len(keys)

    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        objects, name = self._objects, self._reader.name(key)
        if not self._reader.exists(objects, key, cancel):
            return False
        self._ask(lambda: objects.delete(name), "delete", key=key, cancel=cancel)
        return True

    def open_raw(self, key: str) -> RawBlock:
        return RawObject(self._reader, self._objects, key)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        if prefix and not is_key(prefix) and not is_key(f"{prefix}x"):
            return  # no key starts so, and a server may refuse to look
        for name in self._names(self._reader.name(prefix)):
            key = name.removeprefix(self.options.name_prefix)
            if is_key(key):
                yield key

    def _names(self, start: str) -> Iterator[str]:
        """Yield names in their order; a listing that fails begins anew behind the last one."""
        last, names = "", self._objects.list_names(start)

        def following() -> str | None:
            nonlocal names
            try:
                return next((name for name in names if name > last), None)
            except Refused:
                names = self._objects.list_names(start)  # what has failed would end here
                raise

        while (name := self._ask(following, "list")) is not None:
            last = name
            yield name

    def probe(self) -> list[Finding]:
        return list(Probe(self.options, self._ask).findings(self._objects))

    @property
    def retries_made(self) -> int:
        return self._ask.made_again

    def use_threads(self, run_all: RunAll) -> None:
        self._run_all = run_all

    def after_fork(self) -> None:
        if self._connected is not None:
            sharing.abandon(self._connected)
        self._renew()
        self._refused = self.traits.after_fork == "refuse"

    def close(self) -> None:
        if self._connected is not None and self._pid == os.getpid():
            sharing.give_back(self._connected)
        self._connected = None
