"""Store blocks as S3 objects; the base class of every S3 backend."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Self, cast

from kvio.abc import Backend, RawBlock, RunAll
from kvio.backends.s3 import body
from kvio.backends.s3.client import MAX_DELETED, Connect, Objects, Traits
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.options import S3Options, options_from_url
from kvio.backends.s3.probing import Probe, Server
from kvio.backends.s3.reading import RawObject, Reader
from kvio.backends.s3.retries import RetryPolicy, run_sequentially
from kvio.backends.s3.timeouts import BlockingObjects, TimeLimited
from kvio.backends.s3.writing import Writer
from kvio.errors import (
    AccessDeniedError,
    BlockNotFoundError,
    ConfigError,
    KvioError,
    MissingDependencyError,
    StorageError,
    StoreClosedError,
    UnknownBackendError,
    UnsupportedError,
)
from kvio.registry import load_backend
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


@dataclass(slots=True)
class _Shared:
    objects: Objects
    users: int = 1


_clients: dict[tuple[Connect, S3Options], _Shared] = {}
_lock = threading.Lock()
#: Clients of the parent process. They are never freed: that would close connections which the
#: parent is using, or wait for threads which the child does not have.
_ABANDONED: Final[list[object]] = []
#: Libraries that this process has used, and those that a parent of it had used before the fork.
_used: Final[set[Connect]] = set()
_used_before_fork: Final[set[Connect]] = set()


def acquire(connect: Connect, options: S3Options) -> Objects:
    """Return the client of a configuration; connect if there is none.

    Raises:
        ConfigError: the library does not support an option.
    """
    client_key = connect, _connection(options)
    if (known := _join(client_key)) is not None:
        return known
    _used.add(connect)
    objects = connect(options)  # outside the lock: some libraries ask for credentials here
    if objects.traits.timeouts != "library":
        objects = TimeLimited(cast(BlockingObjects, objects), options)
    if (known := _join(client_key, objects)) is not objects:
        objects.close()  # another thread was faster
    return known or objects


def _join(client_key: tuple[Connect, S3Options], new: Objects | None = None) -> Objects | None:
    """Use the client of a configuration, or else a *new* one; None: there is neither."""
    with _lock:
        shared = _clients.get(client_key)
        if shared is not None:
            shared.users += 1
            return shared.objects
        if new is not None:
            _clients[client_key] = _Shared(new)
        return new


def release(objects: Objects) -> None:
    """Stop using a client; close it if no other store uses it."""
    with _lock:
        for client_key, shared in _clients.items():
            if shared.objects is objects:
                shared.users -= 1
                if not shared.users:
                    del _clients[client_key]
                    break
                return
        else:
            return
    objects.close()


def abandon(objects: Objects) -> None:
    """Keep a client of the parent process alive without using it."""
    _ABANDONED.append(objects)


def _companion_libraries(options: S3Options) -> Iterator[Connect]:
    """Yield those installed that list every name and complete parts on a condition."""
    for name in ("s3+boto3", "s3+minio"):
        with suppress(MissingDependencyError, UnknownBackendError):
            backend = cast(type[S3Backend], load_backend(name))
            if backend.refused(options) is None:
                yield backend.library


def _connection(options: S3Options) -> S3Options:
    """Return the options with those that do not affect a client set to fixed values."""
    return replace(
        options,
        prefix="",
        namespace="",
        retries=0,
        retry_s=0.0,
        checksum="crc32c",
        conditional="probe",
        durability="visible",
        layout="block",
        verify="full",
    )


def _forget_all() -> None:
    global _lock  # another thread may have held it at the fork
    _lock = threading.Lock()
    _ABANDONED.extend(_clients.values())
    _clients.clear()
    _used_before_fork.update(_used)


os.register_at_fork(after_in_child=_forget_all)


#: The last part of the name of an object that never exists: no key starts with a dot.
_NOTHING: Final = ".kvio-nothing"
#: Concurrent HEAD requests of `count_leading`: at first, and at most; they double while all hit.
_FIRST_HEADS: Final = 16
_MOST_HEADS: Final = 64


class S3Backend(Backend):
    """Stores each block as one object under the prefix; a subclass only names its library.

    Thread-safe. After a fork the child connects again; where the library would hang in the child,
    every call raises `UnsupportedError`, and so does opening a store there.
    """

    #: Creates the library's client. It is a class, so Python does not bind it as a method.
    library: ClassVar[Connect]
    traits: ClassVar[Traits]

    def __init__(self, options: S3Options) -> None:
        self.options = options
        self._closed = False
        if why := self.refused(options):
            raise ConfigError(why)
        self._run_all: RunAll = run_sequentially
        self._renew()
        try:
            check = partial(self._objects.check_bucket, self._reader.name(_NOTHING))
            self._request(check, f"open the bucket {options.bucket!r}", patient=False)
        except BaseException:
            self.close()
            raise

    @classmethod
    def usable_here(cls) -> bool:
        """Return False where the library would hang: a parent process had used it before a fork."""
        return cls.traits.after_fork == "reopen" or cls.library not in _used_before_fork

    @classmethod
    def default_io_threads(cls) -> int:
        """Return 64: requests wait for the network, not for processors."""
        return 64

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

    @classmethod
    def refused(cls, options: S3Options) -> str | None:
        """Return which option the library does not support, and why; None: it supports all."""
        default = S3Options(bucket=options.bucket)
        for option, reason, values in cls.traits.unsupported_options:
            value = getattr(options, option)
            if value in values or (not values and value != getattr(default, option)):
                return f"{cls.name} does not support the option {option!r}: {reason}"
        return None

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._request = RetryPolicy(self.name, self.options.retries, self.options.retry_s)
        self._reader = Reader(self.options, self._request, self._run_parallel)
        self._server = Server(self.options, self._request)
        self._writer = Writer(
            self.options, self._request, self._reader, self._server, self._run_parallel
        )
        self._lock = threading.Lock()
        self._connected: Objects | None = None
        self._second: Objects | None = None

    @property
    def _objects(self) -> Objects:
        """Return this process's client of the library; connect on first use."""
        connected = self._connected
        if connected is not None and self._pid == os.getpid():
            return connected
        if self._closed:
            raise StoreClosedError("the store is closed")
        if self._pid != os.getpid():
            self.after_fork()
        if not self.usable_here():
            raise UnsupportedError(
                f"{self.name} does not survive a fork: a parent process used its library, which "
                "would hang here; start children with multiprocessing's 'spawn' or 'forkserver', "
                "or open a store in the child with s3+boto3, s3+minio or s3+torch"
            )
        with self._lock:
            if self._connected is None:
                self._connected = acquire(type(self).library, self.options)
            return self._connected

    def _companion(self) -> Objects | None:
        """Return a client of one of `_companion_libraries`, if it can be made."""
        known = self._second
        if known is not None:
            return known
        for library in _companion_libraries(self.options):
            try:
                objects = acquire(library, self.options)
            except ConfigError:  # as of a profile that is not there
                continue
            with self._lock:
                before, self._second = self._second, objects
            if before is not None:  # taken by another thread too
                release(before)
            return objects
        return None

    def _run_parallel(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        return self._run_all(tasks)

    @property
    def capabilities(self) -> Capabilities:
        options, traits = self.options, self.traits
        honours = self._server.honours_conditions(self._objects) or False
        exclusive = honours and self._server.lets_one_win(self._objects)
        notes = []
        if not traits.conditional:
            notes.append(
                "the library sends no If-None-Match: two writers of a key may both succeed"
            )
        elif not honours:
            notes.append(
                "the server does not honour If-None-Match: two writers of a key may both succeed"
            )
        elif not exclusive:
            notes.append(
                "the server checks If-None-Match before it writes, not as it writes: writers of a "
                "key at the same time may all succeed"
            )
        if traits.after_fork == "refuse":
            notes.append("not usable in a forked child: start children with spawn")
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
        if cancel is not None:  # an abandoned request still reads the bytes: copy them first
            parts = [memoryview(body.join(parts))]
        objects = self._objects
        honoured = if_exists != "replace" and self._server.honours_conditions(objects)
        # While that is not known, a condition cannot harm a block that must be new.
        conditional = honoured if honoured is not None else if_exists == "error"
        nbytes, traits = body.total_bytes(parts), self.traits
        several = nbytes + body.NBYTES > self.options.part_bytes
        condition_at_end = if_exists == "error" and conditional and several
        empty = not nbytes and self.options.layout == "plain"
        write = partial(
            self._writer.write,
            key=key,
            parts=parts,
            if_exists=if_exists,
            conditional=conditional,
            cancel=cancel,
        )
        if (condition_at_end and not traits.conditional_parts) or (
            empty and not traits.empty_objects
        ):
            other = self._companion()
            try:
                if other is not None:
                    return write(other)
            except AccessDeniedError as exc:
                if exc.errno != errno.ENOKEY:  # it finds no credentials: the own library did
                    raise
        return write(objects)

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
        return self._reader.read_new(self._objects, key, cancel)

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
        at, width = 0, _FIRST_HEADS
        while at < len(keys):
            group = keys[at : at + width]
            tasks = [partial(self._reader.exists, self._objects, key, cancel) for key in group]
            found = self._run_parallel(tasks)
            if not all(found):
                return at + found.index(False)
            at, width = at + len(group), min(2 * width, _MOST_HEADS)
        return len(keys)

    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        objects, name = self._objects, self._reader.name(key)
        if not self._reader.exists(objects, key, cancel):
            return False
        self._request(lambda: objects.delete(name), "delete", key=key, cancel=cancel)
        return True

    def delete_blocks(
        self, keys: Sequence[str], *, cancel: Cancellation | None = None
    ) -> list[BlockResult]:
        """Look for each block, then delete those that are there with one request per 1000."""
        found: dict[str, BlockResult] = {}

        def results() -> list[BlockResult]:
            told, by_key = [], dict(found)
            for key in keys:
                told.append(by_key.get(key) or BlockResult(key, BlockStatus.CANCELLED))
                if told[-1].ok:  # a key that is named twice is gone the second time
                    by_key[key] = BlockResult(key, BlockStatus.MISSING)
            return told

        if cancel is not None:
            cancel.results = results
        there = []
        for key in dict.fromkeys(keys):
            if cancel is not None and cancel.requested:
                return results()
            try:
                if self._reader.exists(self._objects, key, cancel):
                    there.append(key)
                else:
                    found[key] = BlockResult(key, BlockStatus.MISSING)
            except KvioError as exc:
                found[key] = BlockResult(key, status_of(exc), 0, exc)
        for at in range(0, len(there), MAX_DELETED):
            if cancel is not None and cancel.requested:
                break
            group = there[at : at + MAX_DELETED]
            found |= zip(group, self._delete_together(group, cancel), strict=True)
        return results()

    def _delete_together(
        self, keys: Sequence[str], cancel: Cancellation | None
    ) -> list[BlockResult]:
        """Delete blocks that are there, together, or one by one where that fails."""
        objects, names = self._objects, list(map(self._reader.name, keys))
        if len(keys) == 1:
            return [self._delete_one(objects, keys[0], cancel)]
        try:
            self._request(partial(objects.delete_many, names), "delete", cancel=cancel)
            return [BlockResult(key, BlockStatus.OK) for key in keys]
        except KvioError:
            return [self._delete_one(objects, key, cancel, patient=False) for key in keys]

    def _delete_one(
        self, objects: Objects, key: str, cancel: Cancellation | None, *, patient: bool = True
    ) -> BlockResult:
        delete = partial(objects.delete, self._reader.name(key))
        try:
            self._request(delete, "delete", key=key, cancel=cancel, patient=patient)
        except KvioError as exc:
            return BlockResult(key, status_of(exc), 0, exc)
        return BlockResult(key, BlockStatus.OK)

    def open_raw(self, key: str) -> RawBlock:
        return RawObject(self._reader, self._objects, key)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        if prefix and not is_key(prefix) and not is_key(f"{prefix}x"):
            return  # no key starts with this, and a server may reject it
        for name in self._names(self._reader.name(prefix)):
            key = name.removeprefix(self.options.name_prefix)
            if is_key(key):
                yield key

    def _names(self, start: str) -> Iterator[str]:
        """Yield names in order; after a transient error, restart behind the last name.

        Where a foreign name is one that the library cannot list, another library does it.
        """
        last, objects = "", self._objects
        names = objects.list_names(start)
        unlisted: RequestFailed | None = None

        def next_name() -> str | None:
            nonlocal objects, names, unlisted
            try:
                return next((name for name in names if name > last), None)
            except RequestFailed as failed:
                if unlisted is not None and failed.kind is ErrorKind.NO_CREDENTIALS:
                    raise unlisted from None  # the other library finds none
                other = self._companion() if failed.kind is ErrorKind.NAME else None
                objects = other or objects
                names = objects.list_names(start)  # a failed generator is exhausted
                if other is None:
                    raise
                unlisted = failed
            return next_name()

        while (name := self._request(next_name, "list")) is not None:
            last = name
            yield name

    def probe(self) -> list[Finding]:
        return list(Probe(self.options, self._request).findings(self._objects))

    @property
    def retries_made(self) -> int:
        return self._request.retries_made

    def use_threads(self, run_all: RunAll) -> None:
        self._run_all = run_all

    def after_fork(self) -> None:
        if self._connected is not None:
            abandon(self._connected)
        if self._second is not None:
            abandon(self._second)
        self._renew()

    def close(self) -> None:
        for objects in (self._connected, self._second):
            if objects is not None and self._pid == os.getpid():
                release(objects)
        self._connected = self._second = None
        self._closed = True
