"""The POSIX backend: one root directory, one policy, everything else in the engine."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

from kvio._native import EXHAUSTED, LeafTable, Permissions, lib, make_template, open_dir
from kvio.abc import Backend, FastReads, RawBlock, RunAll, Source, SourceFile
from kvio.backends.posix import large, outcome, streams
from kvio.backends.posix.directories import (
    CALIBRATION_NAME,
    TEMP_MARK,
    Directories,
    RootWatch,
    is_leftover,
    key_of,
    make_fan_out,
    open_root,
    place_of,
    read_calibration,
    remove_temporary,
    reopen_root,
    temp_prefix,
    walk_files,
)
from kvio.backends.posix.engine import Engine, chooser
from kvio.backends.posix.options import PosixOptions, options_from_url
from kvio.backends.posix.quick import Quick
from kvio.backends.posix.streams import RawFile
from kvio.core.buffers import BouncePool, ram_bytes, total_bytes
from kvio.errors import (
    AccessDeniedError,
    BlockNotFoundError,
    ConfigError,
    KvioError,
    UnsupportedError,
    storage_error,
)
from kvio.filesystem.descriptors import SHARED, retrying
from kvio.filesystem.io_mode import BY_SIZE, CACHE_AWARE, Always, Policy, load_calibration
from kvio.filesystem.io_mode import Hybrid as HybridPolicy
from kvio.filesystem.permissions import group_number
from kvio.filesystem.probe import NOT_WRITABLE, FileSystem, examine, examine_to_read
from kvio.types import (
    BlockResult,
    Blocks,
    BlockStat,
    BlockStatus,
    Cancellation,
    Capabilities,
    IfExists,
    IOMode,
    Parts,
    Receipt,
)
from kvio.url import StoreURL

_FORMS = (
    "O_TMPFILE, linkat by AT_EMPTY_PATH",
    "O_TMPFILE, linkat by /proc/self/fd",
    "named temporary, rename",
)
_STAT_GROUP = 256
_KEPT_BOUNCE_BUFFERS = 16


class PosixBackend(Backend):
    """Blocks as files below one root directory; subclasses differ in policy alone."""

    needs_direct_io: ClassVar[bool] = False

    def __init__(self, options: PosixOptions) -> None:
        self.options = options
        self._permissions = Permissions(
            options.file_mode, options.dir_mode, group_number(options.group)
        )
        self._open()

    @classmethod
    def from_url(cls, url: StoreURL) -> Self:
        return cls(options_from_url(url))

    def choose_policy(self, fs: FileSystem) -> Policy:
        """Return the policy of this backend."""
        return Always(IOMode.BUFFERED)

    def _open(self, inherited: int | None = None) -> None:
        """Open the root by its path, or the same directory as a parent process."""
        retrying(partial(self._open_root, inherited))
        SHARED.count_roots(1)

    def _open_root(self, inherited: int | None) -> None:
        options = self.options
        self._why_read_only = "read_only=true was asked for" if options.read_only else None
        if inherited is None:
            self._rootfd = open_root(
                options.root,
                create=options.create and not options.read_only,
                shared=options.shared_root,
                durable=options.durability == "durable",
                permissions=self._permissions,
            )
        else:
            self._rootfd = reopen_root(inherited, options.root)
        try:
            self._root = RootWatch(options.root, self._rootfd)
            self._engine = self._make_engine()
            self._quick = Quick(self._engine)
        except BaseException:
            os.close(self._rootfd)
            raise

    def _make_engine(self) -> Engine:
        options = self.options
        prefix = temp_prefix()
        try:
            fs = self._examine(prefix + os.urandom(16).hex())
        except OSError as exc:
            raise storage_error(exc.errno or errno.EIO, f"probe root {options.root!r}") from exc
        read_only = self._why_read_only is not None
        if read_only:
            self._refuse_what_cannot_be_read(fs)
        else:
            self._refuse_what_cannot_be(fs)
        policy = self.choose_policy(fs)
        fixed = isinstance(policy, Always)
        durable = options.durability == "durable" and not read_only
        leaf_table = None
        if options.layout == "block":
            leaf_table = LeafTable(f"{options.namespace}\0".encode())
        directories = Directories(
            self._rootfd,
            leaf_table,
            durable=durable,
            journaled=fs.journaled,
            read_only=read_only,
            permissions=self._permissions,
        )
        if durable and leaf_table is not None:
            self._make_directories(directories)
        return Engine(
            name=self.name,
            options=options,
            root=self._root,
            fs=fs,
            for_write=chooser(policy.for_write),
            for_read=chooser(policy.for_read),
            fixed=chooser(policy.for_write)(0, 1) if fixed else None,
            buffered_below=policy.buffered_below(),
            directories=directories,
            leaf_table=leaf_table,
            bounce=BouncePool(options.segment_bytes, limit=_KEPT_BOUNCE_BUFFERS),
            publish=self._first_publish_form(fs),
            template=make_template(
                memory_align=fs.memory_align,
                offset_align=fs.offset_align,
                chunk_bytes=options.chunk_bytes,
                temp_prefix=prefix.encode(),
                reach_bytes=0 if fixed else ram_bytes() // 2,
                permissions=self._permissions,
            ),
        )

    def _examine(self, probe_name: str) -> FileSystem:
        """Examine the file system, and find out whether it is read-only."""
        if self._why_read_only is None:
            try:
                return examine(self._rootfd, probe_name)
            except OSError as exc:
                if exc.errno not in NOT_WRITABLE or self.options.read_only is False:
                    raise
                self._why_read_only = f"no file can be made in it ({os.strerror(exc.errno)})"
        return self._examine_to_read()

    def _examine_to_read(self) -> FileSystem:
        """Examine the file system by the first block that can be opened."""
        files = walk_files(self._rootfd, self.options.layout, read_only=True)
        with suppress(PermissionError):  # a directory that this user may not list
            for directory, name in files:
                if key_of(self.options.layout, directory, name) is None:
                    continue
                try:
                    with self._opened_to_read(directory) as fd:
                        return examine_to_read(self._rootfd, fd, name)
                except OSError as exc:
                    if exc.errno in EXHAUSTED:
                        raise
        return examine_to_read(self._rootfd, self._rootfd, None)

    @contextmanager
    def _opened_to_read(self, directory: str) -> Iterator[int]:
        fd = open_dir(self._rootfd, directory, create=False, read_only=True)
        try:
            yield fd
        finally:
            os.close(fd)

    def _make_directories(self, directories: Directories) -> None:
        try:
            with self._typed("make the directories of"):
                make_fan_out(directories)
        except BaseException:
            directories.close()
            raise

    def _refuse_what_cannot_be_read(self, fs: FileSystem) -> None:
        empty = fs.probe["direct"] == -errno.ENOENT
        if self.needs_direct_io and not fs.direct_io and not empty:
            raise UnsupportedError(f"{self.name} on {self.options.root!r}: {fs.notes[0]}")

    def _read_only_error(self, doing: str, key: str | None = None) -> AccessDeniedError:
        """Return the error of a call that would change a store that is open read-only."""
        what = doing if key is None else f"{doing} block {key!r}"
        how = (
            "open it without read_only=true"
            if self.options.read_only
            else "make it writable and open it again"
        )
        return AccessDeniedError(
            f"{self.name}: cannot {what}: root {self.options.root!r} is open read-only, because "
            f"{self._why_read_only}; to write, {how}",
            errno=errno.EROFS,
            key=key,
            backend=self.name,
        )

    def _refuse_what_cannot_be(self, fs: FileSystem) -> None:
        options = self.options
        reason = fs.not_durable_because
        if options.durability == "durable" and reason and not options.trust_fsync:
            hint = "" if fs.in_memory else "; trust_fsync=true overrides"
            raise UnsupportedError(f"durability='durable' on {options.root!r}: {reason}{hint}")
        if self.needs_direct_io and not fs.direct_io:
            raise UnsupportedError(f"{self.name} on {options.root!r}: {fs.notes[0]}")
        if options.publish == "tmpfile" and not fs.tmpfile:
            raise UnsupportedError(f"publish='tmpfile' on {options.root!r}: no usable O_TMPFILE")
        durable_tmpfile = (options.publish, options.durability) == ("tmpfile", "durable")
        if durable_tmpfile and not fs.tmpfile_durable:
            raise UnsupportedError(
                f"publish='tmpfile' with durability='durable' on {options.root!r}: a file that is "
                f"synced before it has a name may be lost on {fs.name} here; leave publish to "
                "kvio"
            )

    def _first_publish_form(self, fs: FileSystem) -> int:
        durable = self.options.durability == "durable"
        usable = fs.tmpfile_durable if durable else fs.tmpfile
        if self.options.publish == "rename" or not usable:
            return int(lib.KVIO_PUBLISH_NAMED)
        if fs.probe["link_empty_path"] == 0:
            return int(lib.KVIO_PUBLISH_EMPTY_PATH)
        return int(lib.KVIO_PUBLISH_PROC)

    @property
    def capabilities(self) -> Capabilities:
        engine, fs = self._engine, self._engine.fs
        notes = list(fs.notes)
        writable = self._why_read_only is None
        durable = fs.not_durable_because is None or self.options.trust_fsync
        if not writable:
            notes.append(f"open read-only, because {self._why_read_only}")
        elif fs.not_durable_because and self.options.trust_fsync:
            notes.append(f"durable because trust_fsync=true: {fs.not_durable_because}")
        elif fs.not_durable_because:
            notes.append(f"durability='durable' is refused: {fs.not_durable_because}")
        where = f"{fs.name} ({fs.mount_options})" if fs.mount_options else fs.name
        return Capabilities(
            atomic_write=True,
            exclusive_create=True,
            durable_write=writable and durable,
            checksum=self.options.layout == "block" and engine.checksum,
            native_batch=True,
            shared=True,
            raw_blocks=True,
            writable=writable,
            usable_after_fork=True,
            direct_io=fs.direct_io,
            memory_alignment=fs.memory_align if fs.direct_io else 1,
            publish=_FORMS[engine.publish],
            medium=where,
            notes=tuple(notes),
        )

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        if self._why_read_only is not None:
            raise self._read_only_error("write", key)
        if self._root.check_first:
            self._root.check(key)
        if cancel is None and len(parts) == 1:
            receipt = self._quick.write(key, parts[0], if_exists)
            if receipt is not None:
                return receipt
        nbytes = total_bytes(parts)
        if large.helps_write(self._engine, parts, nbytes):
            return large.write(self._engine, key, parts, nbytes, if_exists, cancel)
        return self._engine.write_one(key, parts, nbytes, if_exists, cancel)

    def write_stream(
        self,
        key: str,
        source: Source,
        *,
        nbytes: int | None,
        at_least: int,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> Receipt:
        if self._why_read_only is not None:
            raise self._read_only_error("write", key)
        if self._root.check_first:
            self._root.check(key)
        return streams.write(self._engine, key, source, nbytes, at_least, if_exists, cancel)

    def write_file(
        self,
        key: str,
        source: SourceFile,
        *,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> Receipt | None:
        if self._why_read_only is not None:
            raise self._read_only_error("write", key)
        if self._root.check_first:
            self._root.check(key)
        if os.fstat(source.dirfd).st_dev != os.fstat(self._rootfd).st_dev:
            return None
        return streams.take(self._engine, key, source, if_exists, cancel)

    @contextmanager
    def scratch_dir(self) -> Iterator[Path]:
        if self._why_read_only is not None:
            raise self._read_only_error("make a directory in")
        path = Path(self.options.root, temp_prefix() + os.urandom(16).hex())
        with self._typed("make a directory in"):
            path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)  # lost is only time: a sweep removes the rest

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
            room = total_bytes(parts)
            wanted = room if nbytes is None else min(nbytes, room)
            return self._engine.read_one(
                key, parts, wanted, cancel, offset=offset, op_flags=lib.KVIO_OP_RANGE
            )
        if cancel is None and len(parts) == 1:
            got = self._quick.read(key, parts[0])
            if got is not None:
                return got
        room = total_bytes(parts)
        if large.helps_read(self._engine, parts, room):
            return large.read(self._engine, key, parts, room, cancel)
        return self._engine.read_one(key, parts, room, cancel)

    def write_blocks(
        self, blocks: Blocks, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> list[BlockResult]:
        if self._why_read_only is not None:
            return self._all_refused("write", blocks.keys)
        error = self._root.find() if self._root.check_first else None
        if error is not None:
            return [outcome.refused(key, error) for key in blocks.keys]
        return self._engine.write(blocks, if_exists, cancel)

    def read_blocks_into(
        self, blocks: Blocks, *, cancel: Cancellation | None = None
    ) -> list[BlockResult]:
        return self._engine.read(blocks, cancel)

    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        answer = self._quick.stat(key) if cancel is None else None
        if answer is None:
            answer = self._engine.run_one(lib.kvio_stat_batch, key)
        crc = answer.crc if answer.flags & lib.KVIO_OP_HAS_CHECKSUM else None
        return BlockStat(key, answer.block_nbytes, crc, answer.file_nbytes, answer.mtime_ns)

    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        scrub = payload and self.options.layout == "block"
        function, flags = lib.kvio_stat_batch, 0
        if scrub:
            function, flags = lib.kvio_read_batch, lib.KVIO_OP_SCRUB
        try:
            answer = self._engine.run_one(function, key, op_flags=flags, verify="full")
        except KvioError as exc:
            return outcome.failure(key, exc)
        return BlockResult(key, BlockStatus.OK, answer.block_nbytes)

    def count_leading(self, keys: Sequence[str], *, cancel: Cancellation | None = None) -> int:
        for at in range(0, len(keys), _STAT_GROUP):
            group = keys[at : at + _STAT_GROUP]
            present = self._engine.count_present(group)
            if present < len(group):
                return at + present
        return len(keys)

    def _all_refused(self, doing: str, keys: Sequence[str]) -> list[BlockResult]:
        return [outcome.failure(key, self._read_only_error(doing, key)) for key in keys]

    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        if self._why_read_only is not None:
            raise self._read_only_error("delete", key)
        try:
            self._engine.run_one(lib.kvio_delete_batch, key)
        except BlockNotFoundError:
            return False
        return True

    def delete_blocks(
        self, keys: Sequence[str], *, cancel: Cancellation | None = None
    ) -> list[BlockResult]:
        if self._why_read_only is not None:
            return self._all_refused("delete", keys)
        return self._engine.delete(keys, cancel)

    def open_raw(self, key: str) -> RawBlock:
        return self._open_file(key)

    def _open_file(self, key: str) -> RawFile:
        directory, name = place_of(self.options.layout, self.options.namespace, key)
        directories = self._engine.directories

        def open_file() -> RawFile:
            with directories.opened(directory) as dirfd:
                return RawFile(dirfd, name, key)

        with self._typed("open a file of"):
            try:
                return retrying(open_file)
            except (FileNotFoundError, NotADirectoryError):
                raise BlockNotFoundError(f"no block {key!r}", key=key) from None

    def drop_cache(
        self, keys: Sequence[str], *, cancel: Cancellation | None = None
    ) -> list[BlockResult]:
        results = []
        for key in keys:
            if cancel is not None and cancel.requested:
                results.append(BlockResult(key, BlockStatus.CANCELLED))
                continue
            try:
                with self._open_file(key) as file:
                    file.drop_cache()
                    self._engine.forget_read(file.inode, file.mtime_ns)
            except BlockNotFoundError:
                results.append(BlockResult(key, BlockStatus.MISSING))
            except KvioError as exc:
                results.append(outcome.failure(key, exc))
            else:
                results.append(BlockResult(key, BlockStatus.OK))
        return results

    def path_of(self, key: str) -> str:
        self._root.check(key)  # else the path may lead into another directory
        directory, name = place_of(self.options.layout, self.options.namespace, key)
        self._open_file(key).close()
        return os.path.join(self.options.root, directory, name)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        with self._typed("list the keys of"):
            for directory, name in self._walk(prefix):
                key = key_of(self.options.layout, directory, name)
                if key is not None and key.startswith(prefix):
                    yield key

    def sweep(self, *, older_than_s: float, dry_run: bool = False) -> list[str]:
        swept = []
        if self._why_read_only is not None and not dry_run:
            raise self._read_only_error("sweep")
        with self._typed("sweep"):
            for path in self._temporaries():
                if is_leftover(path, older_than_s=older_than_s):
                    if not dry_run:
                        remove_temporary(path)
                    swept.append(str(path))
        return swept

    def _temporaries(self) -> Iterator[Path]:
        """Yield the temporaries of all writers, and the directories of `scratch_dir`."""
        for entry in retrying(lambda: list(os.scandir(self._rootfd))):
            if entry.name.startswith(TEMP_MARK) and entry.is_dir(follow_symlinks=False):
                yield Path(self.options.root, entry.name)
        for directory, name in self._walk():
            if name.startswith(TEMP_MARK):
                yield Path(self.options.root, directory, name)

    def _walk(self, prefix: str = "") -> Iterator[tuple[str, str]]:
        read_only = self._why_read_only is not None
        return walk_files(self._rootfd, self.options.layout, prefix, read_only=read_only)

    @contextmanager
    def _typed(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if isinstance(exc, KvioError):
                raise
            raise storage_error(
                exc.errno or errno.EIO, f"{doing} root {self.options.root!r}", backend=self.name
            ) from exc

    @property
    def modes_taken(self) -> dict[str, int]:
        counts = zip(outcome.MODES, self._engine.counters.moved, strict=True)
        return {str(mode): count for mode, count in counts if count}

    def fast_reads(self) -> FastReads | None:
        return self._quick.fast_reads()

    def use_threads(self, run_all: RunAll) -> None:
        self._engine.run_all = run_all

    def after_fork(self) -> None:
        SHARED.begin_in_child()  # this may be called before its own handler is
        self._engine.directories.close_in_child()
        inherited = self._rootfd
        try:
            self._open(inherited)
        finally:
            os.close(inherited)

    def close(self) -> None:
        self._engine.directories.close()
        os.close(self._rootfd)
        SHARED.count_roots(-1)


class PosixTmpfile(PosixBackend):
    """Always through the page cache."""

    name = "posix-tmpfile"


class PosixDirect(PosixBackend):
    """Always past the page cache; refused where direct I/O has no effect."""

    name = "posix-direct"
    needs_direct_io = True

    def choose_policy(self, fs: FileSystem) -> Policy:
        return Always(IOMode.DIRECT)


class Hybrid(PosixBackend):
    """Buffered or direct, whichever is faster by size, cache state, concurrency and calibration."""

    name = "hybrid"

    def choose_policy(self, fs: FileSystem) -> Policy:
        if not fs.direct_io:
            return Always(IOMode.BUFFERED)
        path = Path(self.options.root, CALIBRATION_NAME)
        if self.options.calibration == "none" or not os.path.lexists(path):
            return HybridPolicy(CACHE_AWARE if fs.cachestat else BY_SIZE)
        try:
            text = read_calibration(self.options.root)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"cannot read the calibration {path}: {exc}") from exc
        calibration = load_calibration(text, str(path))
        if not fs.dontcache:
            calibration = calibration.replacing(IOMode.DONTCACHE, IOMode.BUFFERED)
        return HybridPolicy(calibration)
