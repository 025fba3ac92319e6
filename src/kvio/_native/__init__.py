"""The typed door to the C core: the only place that knows cffi.

Calls release the GIL. Addresses stay valid because whatever they point into is held by the object
that carries them. Arrays of operations are in `kvio._native.ops`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvio._native import _core  # type: ignore[attr-defined]  # built by cffi
from kvio._native.faults import current_fault
from kvio._native.signals import reraise

ffi: Final[Any] = _core.ffi
lib: Final[Any] = _core.lib
from_buffer: Final[Any] = ffi.from_buffer
new: Final[Any] = ffi.new
release: Final[Any] = ffi.release
NULL: Final[Any] = ffi.NULL
lib.kvio_add_functions()
#: Runs one operation of python.c; returns the count of a read that succeeded, else the fields of
#: an `ops.Answer` and whether it lacked a descriptor. `signals.reraise` is due after it.
run_one: Final[Any] = _core.run_one
#: Reads one whole block through the page cache, from the arguments of a store; see python.c.
read_fast: Final[Any] = _core.read_fast
#: The length of one flat buffer, and a copy that keeps other threads waiting; see python.c.
flat_nbytes: Final[Any] = _core.flat_nbytes
copy_small: Final[Any] = _core.copy_small

#: No descriptor is left: in the process, or in the system.
EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE)

os.register_at_fork(after_in_child=lib.kvio_forget_spare)

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SMALL_PAGE: Final = 4096
_PARTS: Final[Any] = ffi.typeof("kvio_part[]")
_MPOL_BIND: Final = 2
_MAX_NODES: Final = 1024

#: Names of the system call sites, for messages.
SITES: Final = (
    "", "open a temporary file", "open the block", "open the directory", "make the directory",
    "fstat", "fchmod", "fallocate", "write", "read", "fdatasync", "start writeback", "link",
    "rename", "unlink", "fsync the directory", "close", "cachestat", "fcntl", "truncate",
    "get random bytes", "check that the directory exists", "set the group", "clone",
)  # fmt: skip

CORRUPTIONS: Final = (
    "", "not a regular file", "truncated", "no kvio trailer at its end", "unknown trailer version",
    "the trailer's checksum is wrong", "length and trailer disagree",
    "the block belongs to another key or namespace", "the payload's checksum is wrong",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Template:
    """Settings that every call of a store shares, and what they point into."""

    call: Any
    keep: object


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permission bits of the files and directories that a call makes, and the group they get.

    *group*: a number; None: the group that the system chooses.
    """

    file_mode: int = 0o600
    dir_mode: int = 0o700
    group: int | None = None

    def apply_to(self, call: Any) -> None:
        """Put them into a ``kvio_call *``."""
        call.file_mode = self.file_mode
        call.dir_mode = self.dir_mode
        call.group = lib.KVIO_NO_GROUP if self.group is None else self.group


#: What kvio makes is its owner's alone, unless something else is asked for.
PRIVATE: Final = Permissions()


def make_template(
    *,
    memory_align: int = 4096,
    offset_align: int = 4096,
    chunk_bytes: int = 4 << 20,
    temp_prefix: bytes = b"",
    reach_bytes: int = 0,
    checksum: bool = False,
    permissions: Permissions = PRIVATE,
) -> Template:
    """Make the shared settings of a store's calls.

    *reach_bytes*: a read past the page cache is remembered until so much more was read in that
    way; 0: nothing is. *checksum*: sum what is written, where the call does not say more.
    """
    prefix = from_buffer(temp_prefix + b"\0")
    call = ffi.new("kvio_call *")
    call.memory_align = memory_align
    call.offset_align = offset_align
    call.chunk_bytes = chunk_bytes
    call.temp_prefix = prefix
    permissions.apply_to(call)
    call.flags = lib.KVIO_CHECKSUM if checksum else 0
    recent = ffi.new("kvio_recent *", {"reach_bytes": reach_bytes}) if reach_bytes else ffi.NULL
    call.recent = recent
    return Template(call, (prefix, recent))


class LeafTable:
    """Where keys live in a store with hashed directories; *cdata* is a ``kvio_leaf_table *``."""

    __slots__ = ("_keep", "cdata")

    def __init__(self, prefix: bytes) -> None:
        self._keep = from_buffer(prefix)
        self.cdata = new("kvio_leaf_table *", (self._keep, len(prefix)))
        for leaf in self.cdata.dirs:
            leaf.fd = -1

    def leaf(self, number: int) -> Any:
        """Return the ``kvio_dir *`` of a directory, which lives as long as this object."""
        return self.cdata.dirs + number


def copy_call(template: Template) -> Any:
    """Make the settings of one call; the template must outlive it."""
    call = ffi.new("kvio_call *", template.call[0])
    call.fault = current_fault()
    return call


def set_bounce(call: Any, bounce: Memory) -> None:
    """Lend a call a bounce buffer, which must outlive it."""
    call.bounce = bounce.cdata
    call.bounce_bytes = bounce.nbytes


def check(status: int, path: str = "") -> int:
    """Return a count or descriptor, or raise the OSError of a negative errno."""
    if status < 0:
        raise OSError(-status, os.strerror(-status), path or None)
    return status


def open_dir(
    rootfd: int,
    path: str,
    *,
    create: bool,
    durable: bool = False,
    journaled: bool = True,
    read_only: bool = False,
    permissions: Permissions = PRIVATE,
) -> int:
    """Open a directory below another, making it if asked; the caller closes it.

    *durable*: what is made is synced; *journaled*: see ``KVIO_UNJOURNALED``; *read_only*: the mode
    of no directory is repaired; *permissions*: of what is made.

    Raises:
        OSError: as the failing system call says; links are never followed.
    """
    call = ffi.new("kvio_call *")
    call.fault = current_fault()
    call.flags = (
        (lib.KVIO_DURABLE if durable else 0)
        | (0 if journaled else lib.KVIO_UNJOURNALED)
        | (lib.KVIO_READ_ONLY if read_only else 0)
    )
    permissions.apply_to(call)
    return check(lib.kvio_open_dir(call, rootfd, path.encode(), create), path)


def dir_handle(fd: int) -> bytes | None:
    """Return what distinguishes a directory from one that is made later under its name.

    None: the file system has no such handles (name_to_handle_at(2)), or the system forbids it.
    """
    handle = ffi.new("uint8_t[]", lib.KVIO_HANDLE_BYTES)
    nbytes = lib.kvio_dir_handle(current_fault(), fd, handle)
    return bytes(ffi.buffer(handle, nbytes)) if nbytes > 0 else None


def probe(dirfd: int, name: str) -> dict[str, int]:
    """Try what a directory's file system can do; see ``kvio_probe_result``.

    Raises:
        OSError: no file can be made in it, or a descriptor is lacking to find out.
    """
    result = ffi.new("kvio_probe_result *")
    check(lib.kvio_probe(dirfd, os.fsencode(name), result))
    return _probed(result)


def probe_reading(dirfd: int, name: str | None) -> dict[str, int]:
    """Return as `probe` what a file in the directory shows, if one is named; nothing is written.

    Raises:
        OSError: the file cannot be opened, or a descriptor is lacking to find out.
    """
    result = ffi.new("kvio_probe_result *")
    check(lib.kvio_probe_reading(dirfd, NULL if name is None else os.fsencode(name), result))
    return _probed(result)


def _probed(result: Any) -> dict[str, int]:
    found = {field: int(getattr(result, field)) for field, _ in ffi.typeof(result[0]).fields}
    for lacking in EXHAUSTED:
        if -lacking in found.values():
            check(-lacking)
    return found


def fs_magic(fd: int) -> int:
    """Return the number by which statfs(2) identifies file systems."""
    magic = ffi.new("uint64_t *")
    check(lib.kvio_fs_magic(fd, magic))
    return int(magic[0])


def cached_fraction(fd: int, nbytes: int, offset: int = 0) -> float | None:
    """Return the share of a range in the page cache, 0 to 1; None where the kernel does not say."""
    pages = _cached_pages(fd, nbytes, offset)
    return None if pages is None else float(min(1.0, pages[0] * _PAGE_BYTES / nbytes))


def dirty_bytes(fd: int, nbytes: int) -> int | None:
    """Return how much of a file is not written back yet; None if the kernel does not report it."""
    pages = _cached_pages(fd, nbytes)
    return None if pages is None else pages[1] * _PAGE_BYTES


def _cached_pages(fd: int, nbytes: int, offset: int = 0) -> tuple[int, int] | None:
    resident, dirty = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    if nbytes == 0 or lib.kvio_cached_pages(fd, offset, nbytes, resident, dirty) < 0:
        return None
    return resident[0], dirty[0]


def drop_cache(fd: int) -> None:
    """Write a file's dirty pages and forget its clean ones."""
    check(lib.kvio_drop_cache(fd))


def keep_freed_memory(nbytes: int) -> None:
    """Keep at most so many bytes of freed page-aligned memory."""
    lib.kvio_pool_keep(nbytes)


class Memory:
    """Aligned memory of our own, not zeroed, freed with this object; *cdata* is its address.

    Memory that is aligned to small pages is pooled: see pool.c.

    Raises:
        MemoryError: there is none.
    """

    __slots__ = ("cdata", "nbytes")

    def __init__(self, nbytes: int, alignment: int) -> None:
        pooled = alignment == _SMALL_PAGE
        base = (lib.kvio_pool_alloc if pooled else lib.kvio_alloc)(nbytes, alignment)
        if base == ffi.NULL:
            raise MemoryError(f"cannot allocate {nbytes} bytes")
        free = lib.kvio_pool_free if pooled else lib.kvio_free
        self.cdata = ffi.gc(ffi.cast("uint8_t *", base), free, nbytes)
        self.nbytes = nbytes

    def view(self) -> memoryview:
        """View the memory, which lives as long as the view."""
        return memoryview(ffi.buffer(self.cdata, self.nbytes)).cast("B")


def allocate(nbytes: int, alignment: int) -> memoryview:
    """Allocate writable memory, aligned and not zeroed, freed with its last view.

    Raises:
        MemoryError: there is none.
    """
    return Memory(nbytes, alignment).view()


def view_address(address: int, nbytes: int, owner: object) -> memoryview:
    """View foreign memory that *owner* keeps; the view keeps *owner*."""
    cdata = ffi.gc(ffi.cast("char *", address), _Keep(owner))
    return memoryview(ffi.buffer(cdata, nbytes)).cast("B")


class _Keep:
    """Holds an owner until the memory it owns is viewed no more."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner: object = owner

    def __call__(self, _: Any) -> None:
        self.owner = None


def address_of(view: memoryview) -> int:
    """Return the address of a view's first byte."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view)))


def copy_parts(
    to: Sequence[memoryview], parts: Sequence[memoryview], *, checksum: bool
) -> int | None:
    """Copy flat views into others as far as the shorter list goes; the CRC32C of what arrived."""
    nbytes = min(len(to[0]), len(parts[0])) if len(to) == len(parts) == 1 else None
    if nbytes is not None and nbytes <= lib.KVIO_COPIED_AT_ONCE:
        target, source = to[0], parts[0]  # the most of them: a third of the cost of arrays of one
        writable = from_buffer(target, require_writable=True)
        crc = lib.kvio_copy_one(writable, from_buffer(source), nbytes, 0, checksum)
        return crc if checksum else None
    into = [(from_buffer(view, require_writable=True), len(view)) for view in to]
    out_of = [(from_buffer(view), len(view)) for view in parts]
    crc = lib.kvio_copy_parts(
        new(_PARTS, into), len(into), new(_PARTS, out_of), len(out_of), 0, checksum
    )
    reraise()
    return int(crc) if checksum else None


def advise(view: memoryview, advice: int) -> None:
    """Advise the kernel on the use of pages: madvise(2)."""
    check(lib.kvio_advise(from_buffer(view), len(view), advice))


def bind_node(view: memoryview, node: int) -> None:
    """Let pages that are touched from now on come from one NUMA node: mbind(2)."""
    words = node_mask((node,))
    check(lib.kvio_bind_memory(from_buffer(view), len(view), _MPOL_BIND, words, len(words)))


def node_mask(nodes: Sequence[int]) -> list[int]:
    """Return a set of NUMA nodes as a bit mask for the kernel, in words of 64 bits.

    Raises:
        OSError: no kernel has a node of that number (EINVAL).
    """
    if not all(0 <= node < _MAX_NODES for node in nodes):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    words = [0] * (max(nodes, default=-1) // 64 + 1)
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    return words


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Continue a CRC32C (Castagnoli) over *data*; 0 starts one."""
    return int(lib.kvio_crc32c(value, ffi.from_buffer(data), len(data)))


def crc32c_combine(parts: Iterable[tuple[int, int]]) -> int:
    """Join the checksums of consecutive pieces, given as (checksum, length) pairs."""
    whole = 0
    for value, nbytes in parts:
        whole = lib.kvio_crc32c_combine(whole, value, nbytes)
    return whole


def crc32c_implementation() -> str:
    """Name the instructions the checksum uses on this processor."""
    names = ("portable", "sse4.2", "avx512-vpclmulqdq", "armv8-crc")
    return names[lib.kvio_crc32c_implementation()]
