"""Plan a shared file, and open it for a handle: create, join, recover, or read."""

from __future__ import annotations

import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from kvio.errors import BlockNotFoundError, ConfigError
from kvio.filesystem.io_mode import Hybrid
from kvio.filesystem.permissions import (
    check_dir_mode,
    check_file_mode,
    group_number,
    umask,
)
from kvio.filesystem.probe import FileSystem, recall
from kvio.sharedfile import lifecycle
from kvio.sharedfile.layout import MAX_ALIGN, Layout, even_sizes, stripe_bytes
from kvio.sharedfile.lifecycle import find_shared_state, typed
from kvio.sharedfile.names import Names, make_directories, open_names
from kvio.sharedfile.plan import Plan
from kvio.sharedfile.reading import Mode, open_checked
from kvio.sharedfile.state import SharedState
from kvio.types import Durability, IOMode, MiB, Verify
from kvio.types import Layout as Ending

if TYPE_CHECKING:
    from kvio.placement import Placement

_CELL_BYTES: Final = 4 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFileOptions:
    """The options of `SharedFile.create`.

    Attributes:
        sizes: the bytes of each rank's domain, one after the other; None: equal, whole blocks.
        stripe_bytes: length of pieces that are assigned to ranks in turn (round-robin); 0: one
            contiguous domain per rank.
        align: the file block in bytes, the smallest unit of a write; "auto": that of the file
            system and its direct I/O, and equal domains then begin on its stripes if it has any.
        cell_bytes: bytes per checksum: a read of a range may read so much more, and after a crash
            an incomplete cell is written again.
        mode: "buffered", "direct", or "hybrid", which chooses one of them for the whole file.
        durability: "durable": `seal` syncs file and directory; "visible": it does not.
        layout: "block": checksums after the payload; "plain": the payload only.
        checksum: compute checksums.
        sidecar: keep the checksums of a plain file in a file beside it, so that `SharedFile.open`
            reads and verifies it.
        file_mode: permissions of the sealed file, such as 0o440; None: 0o444 less the umask of the
            process that creates it. Until it is sealed it is the owner's alone.
        dir_mode: permissions of missing directories of the path, such as 0o750, which are then
            made; None: the directory must exist.
        group: name or number of the group of the file and of directories that are made; None: the
            system's choice.
        preallocate: allocate all blocks before the first write.
        if_exists: "error", or "replace": `seal` replaces an existing file.
        io_threads: threads of `submit_pwrite`, and threads that help with large pieces.
        placement: processors for these threads; None: the system decides.
    """

    sizes: tuple[int, ...] | None = None
    stripe_bytes: int = 0
    align: int | Literal["auto"] = "auto"
    cell_bytes: int = _CELL_BYTES
    mode: Mode = "hybrid"
    durability: Durability = "durable"
    layout: Ending = "block"
    checksum: bool = True
    sidecar: bool = False
    file_mode: int | None = None
    dir_mode: int | None = None
    group: str | int | None = None
    preallocate: bool = True
    if_exists: Literal["error", "replace"] = "error"
    io_threads: int = 4
    placement: Placement | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode)
        _check_choice("durability", self.durability, get_args(Durability))
        _check_choice("layout", self.layout, get_args(Ending))
        _check_choice("if_exists", self.if_exists, ("error", "replace"))
        check_io_threads(self.io_threads)
        if self.align != "auto" and (self.align < 1 or self.align & (self.align - 1)):
            raise ConfigError(f"align must be 'auto' or a power of two, not {self.align!r}")
        if self.sidecar and (self.layout != "plain" or not self.checksum):
            raise ConfigError("sidecar=True keeps the checksums of layout='plain', checksum=True")
        check_file_mode(self.file_mode)
        check_dir_mode(self.dir_mode)


def check_io_threads(io_threads: int) -> None:
    """Raise `ConfigError` if this is not a number of threads."""
    if io_threads < 1:
        raise ConfigError(f"io_threads must be 1 or more, not {io_threads}")


def check_mode(mode: str) -> None:
    """Raise `ConfigError` if this is not a `Mode`."""
    _check_choice("mode", mode, get_args(Mode))


def check_verify(verify: str) -> None:
    """Raise `ConfigError` if this is not a `Verify`."""
    _check_choice("verify", verify, get_args(Verify))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def choose_options(choices: dict[str, Any]) -> SharedFileOptions:
    """Return the options of keywords.

    Raises:
        ConfigError: an option is unknown, or its value is wrong.
    """
    known = {field.name for field in fields(SharedFileOptions)}
    unknown = sorted(set(choices) - known)
    if unknown:
        raise ConfigError(f"no option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    if choices.get("sizes") is not None:
        choices = {**choices, "sizes": tuple(choices["sizes"])}
    return SharedFileOptions(**choices)


def choose_places(placement: Placement | None, threads: int) -> Callable[[int], None] | None:
    """Return a function that each thread calls first to set its processors; None: nothing to do.

    Raises:
        ConfigError: the placement does not fit this machine.
    """
    if placement is None:
        return None
    from kvio.placement import thread_placer  # imported late: few programs use it

    return thread_placer(placement, threads)


def make_plan(
    names: Names, size: int, writers: int, options: SharedFileOptions
) -> tuple[Plan, str]:
    """Return the plan of a file, and the reason for its I/O mode.

    Raises:
        ConfigError: an option is wrong, or the file system cannot be durable.
    """
    with typed(names, "create"):
        fs = recall(names.dirfd, names.new_probe())
        block = _block_bytes(names.dirfd)
        stripe = stripe_bytes(names.dirfd, fs.probe["fs_magic"])
    if options.durability == "durable" and fs.not_durable_because:
        raise ConfigError(
            f"{names.path!r} cannot be durable: {fs.not_durable_because}; "
            "durability='visible' promises less"
        )
    direct, reason = _choose_mode(options, fs, size // max(writers, 1), writers)
    align = _alignment(options, fs, block, direct=direct)
    layout = _lay_out(size, writers, options, align, stripe)
    plan = Plan(
        file_id=secrets.token_bytes(16),
        boot_id=boot_id(),
        layout=layout,
        memory_align=fs.memory_align,
        direct=direct,
        checksum=options.checksum,
        durable=options.durability == "durable",
        index=options.layout == "block",
        replace=options.if_exists == "replace",
        sidecar=options.sidecar,
        file_mode=stat.S_IRUSR | 0o444 & ~umask()
        if options.file_mode is None
        else options.file_mode,
    )
    return plan, reason


def _choose_mode(
    options: SharedFileOptions, fs: FileSystem, nbytes: int, writers: int
) -> tuple[bool, str]:
    if options.mode == "direct":
        if not fs.direct_io:
            raise ConfigError(f"no direct I/O here: {'; '.join(fs.notes) or fs.name}")
        return True, "asked for"
    if options.mode == "buffered":
        return False, "asked for"
    if not fs.direct_io:
        return False, f"{fs.name} has no direct I/O here"
    if writers == 1 and options.durability == "visible":
        return False, "one writer, and nothing has to be durable: the page cache is faster"
    decision = Hybrid().for_write(nbytes, writers)
    return decision.mode is IOMode.DIRECT, f"{decision.reason}, a writer"


def _block_bytes(dirfd: int) -> int:
    """Return the file system's block; 4096 where it reports a preferred size that is larger."""
    block = os.fstatvfs(dirfd).f_bsize
    return block if block & (block - 1) == 0 and 0 < block <= MAX_ALIGN else 4096


def _alignment(options: SharedFileOptions, fs: FileSystem, block: int, *, direct: bool) -> int:
    needed = max(block, fs.offset_align) if direct else block
    if options.align == "auto":
        return max(needed, 4096)
    if options.align % needed:
        raise ConfigError(f"align must be a multiple of {needed} here, not {options.align}")
    return options.align


def _lay_out(
    size: int, writers: int, options: SharedFileOptions, align: int, stripe: int
) -> Layout:
    sizes: tuple[int, ...] = ()
    if options.sizes is not None:
        sizes = options.sizes
    elif not options.stripe_bytes:
        on_stripes = stripe if stripe and stripe % align == 0 and options.align == "auto" else align
        sizes = even_sizes(size, writers, on_stripes)
    return Layout(size, writers, align, options.cell_bytes, options.stripe_bytes, sizes)


def boot_id() -> bytes:
    """Return 16 bytes that differ between boots of machines; zeros if the kernel has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return bytes(16)
    return bytes.fromhex(text.strip().replace("-", ""))[:16]


# --------------------------------------------------------------------------------------------------
# The status of a shared file, found without opening it to write or recover.


StateName = Literal["preparing", "open", "sealing", "failed", "aborted", "sealed"]


@dataclass(frozen=True, slots=True)
class SharedFileStatus:
    """The state of a shared file at one moment.

    Attributes:
        path: as passed.
        state: "sealed": the file is complete. "preparing": it is being created; "open": it is
            being written; "sealing": it is being sealed, or the process that did so has ended;
            "failed": I/O failed, and it can only be aborted; "aborted": it is being removed.
        size: bytes of the payload.
        writers: number of ranks.
        checksums: their place: "file": after the payload, "sidecar": in a file beside it,
            "none": there are none.
        owed: missing bytes by rank; complete ranks are left out.
        writing: ranks with an open handle.
        sealer: the handle that seals is open; if not, recover or abort the file.
        failures: errno by rank, of ranks whose I/O failed.
        this_boot: it was created since this machine was started; else its written cells are not
            kept.
    """

    path: str
    state: StateName
    size: int
    writers: int
    checksums: Literal["file", "sidecar", "none"]
    owed: dict[int, int]
    writing: tuple[int, ...]
    sealer: bool
    failures: dict[int, int]
    this_boot: bool

    @property
    def owed_bytes(self) -> int:
        """The number of missing bytes of all ranks."""
        return sum(self.owed.values())


def status_of(names: Names) -> SharedFileStatus:
    """Return the state of the file at a path; see `SharedFile.status`."""
    with typed(names, "find the state of"):
        try:
            shared = find_shared_state(names)
        except BlockNotFoundError:
            return _of_sealed(names)
        try:
            if names.is_inode(names.final, shared.inode):  # its map is being removed
                return _of_sealed(names)
            return _of_shared_state(names, shared)
        finally:
            shared.close()


def _of_sealed(names: Names) -> SharedFileStatus:
    fd, index = open_checked(names)
    try:
        plain = os.fstat(fd).st_size == index.layout.size
    finally:
        os.close(fd)
    return SharedFileStatus(
        path=names.path,
        state="sealed",
        size=index.layout.size,
        writers=index.layout.writers,
        checksums="none" if index.checksums is None else "sidecar" if plain else "file",
        owed={},
        writing=(),
        sealer=False,
        failures={},
        this_boot=True,
    )


def _of_shared_state(names: Names, shared: SharedState) -> SharedFileStatus:
    plan = shared.plan
    owed: Counter[int] = Counter()
    for rank, _, nbytes in shared.missing():
        owed[rank] += nbytes
    kept = plan.checksum and (plan.index or plan.sidecar)
    return SharedFileStatus(
        path=names.path,
        state=cast("StateName", shared.state.name.lower()),
        size=plan.layout.size,
        writers=plan.layout.writers,
        checksums="none" if not kept else "sidecar" if plan.sidecar else "file",
        owed=dict(owed),
        writing=tuple(rank for rank in range(plan.layout.writers) if shared.is_locked(rank)),
        sealer=shared.is_locked(plan.layout.writers),
        failures=dict(shared.failures()),
        this_boot=plan.boot_id == boot_id() and any(plan.boot_id),
    )


# --------------------------------------------------------------------------------------------------
# Open a shared file for a handle: create, join, recover, or read a sealed one.


AnyPath = str | os.PathLike[str]


@dataclass(slots=True, kw_only=True)
class Opened:
    """An open shared file, from which a handle is made.

    Attributes:
        names: the open directory, and the names in it.
        map: the map of its writers; None: the file is sealed.
        fd: the data file that is written, or -1.
        rank: the rank that the handle writes for; None: any.
        seals: the handle may seal.
        reason: why the I/O mode was chosen.
        io_threads, verify, mode: the options; the mode is that of reads.
        on_start: called first by each thread, with its number.
    """

    names: Names
    map: SharedState | None = None
    fd: int = -1
    rank: int | None = None
    seals: bool = False
    reason: str = ""
    io_threads: int = 4
    on_start: Callable[[int], None] | None = None
    verify: Verify = "full"
    mode: Mode = "hybrid"


@contextmanager
def _opening(path: AnyPath) -> Iterator[Names]:
    names = open_names(path)
    try:
        yield names
    except BaseException:
        names.close()
        raise


def create(
    path: AnyPath, size: int, writers: int, rank: int | None, choices: dict[str, Any]
) -> Opened:
    """Make a file; see `SharedFile.create`."""
    chosen = choose_options(choices)
    on_start = choose_places(chosen.placement, chosen.io_threads)
    group = group_number(chosen.group)
    if chosen.dir_mode is not None:
        durable = chosen.durability == "durable"
        make_directories(path, chosen.dir_mode, group=group, durable=durable)
    with _opening(path) as names:
        plan, reason = make_plan(names, size, writers, chosen)
        plan.layout.check_rank(rank or 0)
        shared, fd, allocated = lifecycle.create(
            names, plan, preallocate=chosen.preallocate, group=group
        )
    if chosen.preallocate and not allocated:
        reason = f"{reason}; the file system cannot preallocate"
    return Opened(
        names=names, map=shared, fd=fd, rank=rank, seals=True, reason=reason,
        io_threads=chosen.io_threads, on_start=on_start,
    )  # fmt: skip


def join(path: AnyPath, rank: int, io_threads: int, placement: Placement | None) -> Opened:
    """Open a file that is being written, for a rank; see `SharedFile.open`."""
    check_io_threads(io_threads)
    on_start = choose_places(placement, io_threads)
    with _opening(path) as names:
        shared, fd = lifecycle.join(names, boot_id())
        try:
            shared.plan.layout.check_rank(rank)
        except BaseException:
            os.close(fd)
            shared.close()
            raise
    return Opened(
        names=names, map=shared, fd=fd, rank=rank, io_threads=io_threads, on_start=on_start
    )


def recover(path: AnyPath, io_threads: int, placement: Placement | None) -> Opened:
    """Take over a file; see `SharedFile.recover`."""
    check_io_threads(io_threads)
    on_start = choose_places(placement, io_threads)
    with _opening(path) as names:
        found = lifecycle.recover(names, boot_id())
    if found is None:
        return Opened(names=names)
    return Opened(
        names=names, map=found[0], fd=found[1], seals=True, reason="after a recovery",
        io_threads=io_threads, on_start=on_start,
    )  # fmt: skip


def status(path: AnyPath) -> SharedFileStatus:
    """Return the state of the file at a path; see `SharedFile.status`."""
    names = open_names(path)
    try:
        return status_of(names)
    finally:
        names.close()


def sealed(
    path: AnyPath,
    verify: Verify,
    mode: Mode,
    io_threads: int,
    placement: Placement | None,
) -> Opened:
    """Open a sealed file; see `SharedFile.open`."""
    check_verify(verify)
    check_mode(mode)
    check_io_threads(io_threads)
    on_start = choose_places(placement, io_threads)
    with _opening(path) as names:
        return Opened(
            names=names, verify=verify, mode=mode, io_threads=io_threads, on_start=on_start
        )
