"""Test what a file system or bucket supports, and explain each answer."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import quote

from kvio import _native
from kvio.backends.posix.directories import CALIBRATION_NAME, read_calibration, temp_prefix
from kvio.core.store import open_store
from kvio.diagnostics.tuning import scratch_directory
from kvio.errors import ConfigError, KvioError, storage_error
from kvio.filesystem.io_mode import load_calibration
from kvio.filesystem.probe import NOT_WRITABLE, FileSystem, examine, examine_to_read
from kvio.types import Capabilities, Finding, GiB
from kvio.url import StoreURL, parse_url

_FILE_BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
_NODES: Final = "/sys/devices/system/node/online"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about one path or URL, and a recommendation.

    Attributes:
        target: the path or URL.
        findings: the answers.
        url: the recommended store URL, or None.
        advice: sentences, the most important first.
        refused: why no store can be opened with the URL; None if one can, or if the target is a
            directory.
    """

    target: str
    findings: tuple[Finding, ...]
    url: str | None
    advice: tuple[str, ...]
    refused: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def diagnose(target: str) -> Diagnosis:
    """Test what a directory or the storage of a store URL supports; leave no files behind.

    Raises:
        ConfigError: *target* is neither a directory nor a store URL.
        UnknownBackendError, MissingDependencyError: no such backend is installed.
        StorageError: the storage failed.
    """
    if "://" not in target:
        return _diagnose_directory(os.path.abspath(target), target)
    url = parse_url(target)
    if url.scheme not in _FILE_BACKENDS:
        return _diagnose_store(target)
    path = url.path or str(url.options.get("root") or "")
    if url.host or not path.startswith("/"):
        open_store(target).close()  # raises the error that explains the URL
    diagnosis = _diagnose_directory(path, path)
    permissions = next(f for f in diagnosis.findings if f.name == "permissions")
    read_only = any(f.name == "writing" for f in diagnosis.findings)
    opens = _try_reading(target) if read_only else _try_opening(url, path, permissions)
    findings = (opens, *diagnosis.findings)
    refused = None if opens.good else opens.meaning
    return Diagnosis(target, findings, diagnosis.url, diagnosis.advice, refused)


def _diagnose_directory(path: str, shown: str) -> Diagnosis:
    if not os.path.isdir(path):
        missing = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise ConfigError(f"{shown!r} {missing}")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            permissions = _permissions(os.fstat(fd))
            room = os.fstatvfs(fd)
            try:
                fs = examine(fd, temp_prefix() + secrets.token_hex(16))
            except OSError as exc:
                if exc.errno not in NOT_WRITABLE:
                    raise
                fs = examine_to_read(fd, fd, None)
                return _diagnose_read_only(path, shown, fs, permissions, -exc.errno)
        finally:
            os.close(fd)
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"probe {shown!r}") from exc
    findings = (
        *_about_file_system(fs),
        *_about_publishing(fs.probe),
        *_about_io(fs),
        _durable(fs),
        permissions,
        *_about_room(room),
        *_about_machine(),
        _calibration(path, fs),
    )
    url, advice = _recommend(path, fs, permissions)
    return Diagnosis(shown, findings, url, advice)


def _diagnose_read_only(
    path: str, shown: str, fs: FileSystem, permissions: Finding, status: int
) -> Diagnosis:
    """Return the findings that need no write, for a directory that is not writable."""
    writing = Finding(
        "writing",
        _refusal(status),
        False,
        "This user cannot create files here: a store opens read-only, and blocks can be read.",
    )
    findings = (*_about_file_system(fs), writing, permissions, *_about_machine())
    shared = "" if permissions.good else "?shared_root=true"
    advice = ("Run doctor where it can write: most answers need test files.",)
    return Diagnosis(shown, findings, f"hybrid://{quote(path)}{shared}", advice)


def _about_file_system(fs: FileSystem) -> Iterator[Finding]:
    yield Finding(
        "file system",
        fs.name,
        None,
        "Stores the blocks; kvio's promises about power loss depend on it.",
    )
    yield Finding(
        "mount options",
        ", ".join(dict.fromkeys(filter(None, fs.mount_options.split(",")))) or "not visible",
        None,
        "From the kernel; kvio checks for options that make fsync ineffective.",
    )


def _about_publishing(probe: dict[str, int]) -> Iterator[Finding]:
    yield _tried(
        "O_TMPFILE",
        probe["tmpfile"],
        "A block has no name before it is complete, and a killed writer leaves nothing.",
        "Blocks are written to named temporary files; kvio sweep removes those of dead writers.",
    )
    yield _tried(
        "linkat, by descriptor",
        probe["link_empty_path"],
        "A complete block gets its name atomically.",
        "The kernel requires a privilege or refuses; the /proc form does the same.",
    )
    yield _tried(
        "linkat, by /proc",
        probe["link_proc"],
        "A complete block gets its name atomically, without privilege.",
        "Without this and the form by descriptor, O_TMPFILE cannot be used.",
    )
    yield _tried(
        "renameat2, no replace",
        probe["rename_noreplace"],
        "Of two writers of one key exactly one succeeds, also without O_TMPFILE.",
        "Without O_TMPFILE a hard link decides which of two writers of one key succeeds.",
    )


def _about_io(fs: FileSystem) -> Iterator[Finding]:
    probe = fs.probe
    yield Finding(
        "direct I/O",
        "yes" if fs.direct_io else _refusal(probe["direct"]),
        fs.direct_io,
        "Large blocks can bypass the page cache."
        if fs.direct_io
        else "All I/O goes through the page cache; posix-direct does not open here.",
    )
    if fs.direct_io:
        source = f"statx: {probe['dio_offset_align']}" if probe["dio_reported"] else "assumed"
        yield Finding(
            "direct alignment",
            f"memory {fs.memory_align}, file {fs.offset_align} bytes ({source})",
            None,
            "Aligned memory is transferred directly, other memory through a bounce buffer; in "
            "files kvio aligns to at least 4096 bytes, a page.",
        )
    yield _tried(
        "dontcache",
        probe["dontcache"],
        "Buffered I/O can bypass caching; kvio tune measures whether this is faster.",
        "No RWF_DONTCACHE (needs Linux 6.14 and support by the file system); kvio tune omits it.",
    )
    yield _tried(
        "cachestat",
        probe["cachestat"],
        "Hybrid reads detect blocks in the page cache and read them from there.",
        "Hybrid reads choose the I/O mode by size only (cachestat needs Linux 6.5).",
    )
    yield _tried(
        "directory fsync",
        probe["fsync_dir"],
        "A new name survives a power loss after a sync.",
        "A new name may be lost in a power loss, so durable writes are refused.",
    )


def _durable(fs: FileSystem) -> Finding:
    reason = fs.not_durable_because
    if reason is None:
        meaning = "With durability=durable a receipt means the block survives a power loss"
        return Finding(
            "durable writes",
            "promised",
            True,
            f"{'; '.join((meaning, *fs.durable_notes))}.",
        )
    return Finding(
        "durable writes",
        "refused",
        False,
        f"durability=durable does not open here: {reason}.",
    )


def _permissions(info: os.stat_result) -> Finding:
    mode = stat.S_IMODE(info.st_mode)
    answer = f"{mode:04o}, uid {info.st_uid}"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Finding(
            "permissions",
            answer,
            False,
            "Other users can write here, so a store does not open without shared_root=true.",
        )
    if info.st_uid != os.geteuid():
        return Finding(
            "permissions",
            answer,
            False,
            "It belongs to another user, so a store does not open without shared_root=true.",
        )
    return Finding("permissions", answer, True, "Only its owner can change stored blocks.")


def _about_room(room: os.statvfs_result) -> Iterator[Finding]:
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    yield Finding(
        "free space",
        f"{free / GiB:.1f} of {total / GiB:.1f} GiB",
        free > total // 20 if total else None,
        "Available to this user; on a full disk a write fails and stores nothing.",
    )
    counted = room.f_files > 0
    yield Finding(
        "free inodes",
        f"{room.f_favail:,}" if counted else "not limited",
        room.f_favail > 0 if counted else None,
        "The number of blocks and directories that can still be created.",
    )


def _about_machine() -> Iterator[Finding]:
    nodes = _numa_nodes()
    yield Finding(
        "NUMA nodes",
        "not visible" if nodes is None else str(nodes),
        None,
        "With more than one, I/O threads are faster near the memory they use.",
    )
    name = _native.crc32c_implementation()
    yield Finding(
        "CRC32C",
        name,
        name != "portable",
        "Checksums use CPU instructions and cost almost no time."
        if name != "portable"
        else "kvio knows no CRC32C instructions of this CPU; checksums cost time.",
    )


def _numa_nodes() -> int | None:
    """Return the number of nodes in a list like ``0-1,4``, or None if it cannot be read."""
    try:
        with open(_NODES, encoding="ascii") as file:
            ranges = [part.split("-") for part in file.read().strip().split(",")]
        return sum(int(part[-1]) - int(part[0]) + 1 for part in ranges)
    except (OSError, ValueError):
        return None


def _calibration(path: str, fs: FileSystem) -> Finding:
    source = os.path.join(path, CALIBRATION_NAME)
    if not fs.direct_io:
        return Finding("calibration", "not needed", None, "There is only one I/O mode.")
    try:
        reason = load_calibration(read_calibration(path), source).reason
    except FileNotFoundError:
        meaning = "The hybrid backend uses default thresholds; kvio tune measures better ones."
        return Finding("calibration", "none", None, meaning)
    except (OSError, ValueError, KvioError) as exc:
        meaning = f"The hybrid backend does not open until kvio tune replaces it: {exc}."
        return Finding("calibration", "unreadable", False, meaning)
    return Finding("calibration", reason, True, "The hybrid backend uses the measured thresholds.")


def _tried(name: str, status: int, yes: str, no: str) -> Finding:
    if status == 0:
        return Finding(name, "yes", True, yes)
    return Finding(name, _refusal(status), False, no)


def _refusal(status: int) -> str:
    if not status:
        return "no effect"
    # Python's errno.errorcode has the alias ENOTSUP.
    name = "EOPNOTSUPP" if status == -errno.EOPNOTSUPP else errno.errorcode.get(-status, status)
    return f"no ({name})"


def _recommend(path: str, fs: FileSystem, permissions: Finding) -> tuple[str, tuple[str, ...]]:
    advice = []
    backend = "hybrid" if fs.direct_io else "posix-tmpfile"
    if not permissions.good:
        advice.append(
            "Create your own directory here for the store, as create=true does, or chmod go-w "
            "this one; shared_root=true trusts all users who can write here."
        )
    if fs.direct_io:
        advice.append("Run kvio tune on it once: it measures when to bypass the page cache.")
    if fs.not_durable_because is None:
        advice.append("Add ?durability=durable if blocks must survive a power loss.")
    elif fs.in_memory:
        advice.append("Use it as a cache only: nothing here survives a power loss.")
    else:
        advice.append(
            "Add ?durability=durable&trust_fsync=true only if you know that the underlying server "
            "syncs to its disks."
        )
    own = "" if permissions.good else "/kvio?create=true"
    return f"{backend}://{quote(path.rstrip('/') if own else path)}{own}", tuple(advice)


def _try_opening(url: StoreURL, path: str, permissions: Finding) -> Finding:
    """Test the URL's options in a scratch directory, as opening a durable store creates files."""
    name = "a store by this URL"
    options = {k: v for k, v in url.options.items() if k not in ("root", "create")}
    if not permissions.good and "shared_root" not in options:
        return Finding(name, "does not open", False, permissions.meaning)
    with scratch_directory(path) as directory:
        try:
            open_store(url.scheme, root=directory, options=options).close()
        except KvioError as exc:
            reason = str(exc).replace(directory, path)
            return Finding(name, "does not open", False, f"{reason}.")
    return Finding(name, "opens", True, "The file system supports its options.")


def _try_reading(target: str) -> Finding:
    """Test whether the store opens read-only, which creates no files."""
    name = "a store by this URL"
    try:
        open_store(target).close()
    except KvioError as exc:
        return Finding(name, "does not open", False, f"{exc}.")
    return Finding(name, "opens read-only", True, "Its blocks can be read.")


def _diagnose_store(target: str) -> Diagnosis:
    with open_store(target) as store:
        findings = (
            *_about_capabilities(store.capabilities),
            *store.probe(),
            *_about_machine(),
        )
        notes = store.capabilities.notes
        return Diagnosis(target, findings, _without_options(store.url), notes)


def _about_capabilities(can: Capabilities) -> Iterator[Finding]:
    yield Finding("medium", can.medium or "unknown", None, "Stores the blocks.")
    promises = (
        (
            "atomic writes",
            can.atomic_write,
            "Readers see a whole block or none.",
            "Readers may see a part of a block.",
        ),
        (
            "exclusive create",
            can.exclusive_create,
            "Of several writers of a key exactly one succeeds.",
            "Of several writers of a key more than one may succeed.",
        ),
        (
            "durable writes",
            can.durable_write,
            "A block survives a power loss, with durability=durable.",
            "A block may be lost in a power loss.",
        ),
        (
            "checksums",
            can.checksum,
            "Reads verify checksums.",
            "Reads do not detect corrupt blocks.",
        ),
        (
            "shared",
            can.shared,
            "Other processes see the blocks.",
            "Other processes do not see the blocks.",
        ),
        (
            "use after fork",
            can.usable_after_fork,
            "A forked child can use its parent's store.",
            "A forked child must open its own store.",
        ),
    )
    for name, promised, meaning, otherwise in promises:
        answer = "promised" if promised else "not promised"
        yield Finding(name, answer, promised, meaning if promised else otherwise)


def _without_options(url: StoreURL) -> str:
    return f"{url.scheme}://{url.host}{quote(url.path)}"
