"""What a medium can do, answered by trying, each answer with what it means for a user."""

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
from kvio.backends.posix.root import CALIBRATION_NAME, read_calibration, temp_prefix
from kvio.errors import ConfigError, KvioError, storage_error
from kvio.medium import NOT_WRITABLE, Medium, examine, examine_to_read
from kvio.opening import open_store
from kvio.policies import load_calibration
from kvio.tuning import scratch_directory
from kvio.types import Capabilities, Finding, GiB
from kvio.url import StoreURL, parse_url

_FILE_BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
_NODES: Final = "/sys/devices/system/node/online"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All answers about one path or URL, and what to do with it.

    Attributes:
        target: what was asked about.
        findings: the answers.
        url: the store URL recommended here, or None.
        advice: sentences, the most important first.
        refused: why no store opens by the URL that was asked about; None: one opens, or a directory
            was asked about.
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
    """Find out what a directory, or the medium behind a store URL, can do; leaves nothing behind.

    Raises:
        ConfigError: it is neither a directory nor a store URL.
        UnknownBackendError, MissingDependencyError: no such backend is installed.
        StorageError: the medium failed, or no file can be made in it.
    """
    if "://" not in target:
        return _diagnose_directory(os.path.abspath(target), target)
    url = parse_url(target)
    if url.scheme not in _FILE_BACKENDS:
        return _diagnose_store(target)
    path = url.path or str(url.options.get("root") or "")
    if url.host or not path.startswith("/"):
        open_store(target).close()  # says what is wrong with it
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
                medium = examine(fd, temp_prefix() + secrets.token_hex(16))
            except OSError as exc:
                if exc.errno not in NOT_WRITABLE:
                    raise
                medium = examine_to_read(fd, fd, None)
                return _diagnose_read_only(path, shown, medium, permissions, -exc.errno)
        finally:
            os.close(fd)
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"probe {shown!r}") from exc
    findings = (
        *_about_medium(medium),
        *_about_publishing(medium.probe),
        *_about_io(medium),
        _durable(medium),
        permissions,
        *_about_room(room),
        *_about_machine(),
        _calibration(path, medium),
    )
    url, advice = _recommend(path, medium, permissions)
    return Diagnosis(shown, findings, url, advice)


def _diagnose_read_only(
    path: str, shown: str, medium: Medium, permissions: Finding, status: int
) -> Diagnosis:
    """Answer what can be answered where nothing can be tried."""
    writing = Finding(
        "writing",
        _refusal(status),
        False,
        "No file can be made here by this user: a store opens read-only, and blocks can be read.",
    )
    findings = (*_about_medium(medium), writing, permissions, *_about_machine())
    shared = "" if permissions.good else "?shared_root=true"
    advice = ("Ask again where it can be written to: most answers are found by trying.",)
    return Diagnosis(shown, findings, f"hybrid://{quote(path)}{shared}", advice)


def _about_medium(medium: Medium) -> Iterator[Finding]:
    yield Finding(
        "file system",
        medium.name,
        None,
        "Keeps the blocks; what kvio promises about power loss depends on it.",
    )
    yield Finding(
        "mount options",
        ", ".join(dict.fromkeys(filter(None, medium.mount_options.split(",")))) or "not visible",
        None,
        "As the kernel lists them; kvio looks for those that make fsync a lie.",
    )


def _about_publishing(probe: dict[str, int]) -> Iterator[Finding]:
    yield _tried(
        "O_TMPFILE",
        probe["tmpfile"],
        "A block has no name before it is whole, and a killed writer leaves nothing.",
        "Blocks are written to named temporaries; kvio sweep removes those of killed writers.",
    )
    yield _tried(
        "linkat, by descriptor",
        probe["link_empty_path"],
        "A finished block gets its name in one step.",
        "The kernel asks for a privilege or refuses; the /proc form does the same.",
    )
    yield _tried(
        "linkat, by /proc",
        probe["link_proc"],
        "A finished block gets its name in one step, without privilege.",
        "Without it and the form by descriptor, O_TMPFILE cannot be used.",
    )
    yield _tried(
        "renameat2, no replace",
        probe["rename_noreplace"],
        "Of two writers of one key exactly one wins, also without O_TMPFILE.",
        "Without O_TMPFILE a hard link decides which of two writers of one key wins.",
    )


def _about_io(medium: Medium) -> Iterator[Finding]:
    probe = medium.probe
    yield Finding(
        "direct I/O",
        "yes" if medium.direct_io else _refusal(probe["direct"]),
        medium.direct_io,
        "Large blocks can bypass the page cache."
        if medium.direct_io
        else "All I/O goes through the page cache; posix-direct does not open here.",
    )
    if medium.direct_io:
        said = f"statx says {probe['dio_offset_align']}" if probe["dio_reported"] else "assumed"
        yield Finding(
            "direct alignment",
            f"memory {medium.memory_align}, file {medium.offset_align} bytes ({said})",
            None,
            "Memory aligned so goes straight to the device, other memory through a copy; in files "
            "kvio aligns to 4096 bytes at least, a page.",
        )
    yield _tried(
        "dontcache",
        probe["dontcache"],
        "Buffered I/O can leave the page cache as it was; kvio tune measures whether it pays.",
        "No RWF_DONTCACHE (Linux 6.14 and a file system that has it); kvio tune leaves it out.",
    )
    yield _tried(
        "cachestat",
        probe["cachestat"],
        "Hybrid reads see what is in the page cache and take it from there.",
        "Hybrid reads choose by size alone (cachestat needs Linux 6.5).",
    )
    yield _tried(
        "directory fsync",
        probe["fsync_dir"],
        "A new name can be made to survive a power loss.",
        "A new name may be lost with the power, so durable writes are refused.",
    )


def _durable(medium: Medium) -> Finding:
    reason = medium.not_durable_because
    if reason is None:
        meaning = "With durability=durable a receipt means the block survives a power loss"
        return Finding(
            "durable writes",
            "promised",
            True,
            f"{'; '.join((meaning, *medium.durable_notes))}.",
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
            "Others may write here, so a store does not open without shared_root=true.",
        )
    if info.st_uid != os.geteuid():
        return Finding(
            "permissions",
            answer,
            False,
            "It belongs to someone else, so a store does not open without shared_root=true.",
        )
    return Finding("permissions", answer, True, "Only its owner can change what is stored.")


def _about_room(room: os.statvfs_result) -> Iterator[Finding]:
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    yield Finding(
        "free space",
        f"{free / GiB:.1f} of {total / GiB:.1f} GiB",
        free > total // 20 if total else None,
        "What this user may still write; a full medium fails a write whole.",
    )
    counted = room.f_files > 0
    yield Finding(
        "free inodes",
        f"{room.f_favail:,}" if counted else "not limited",
        room.f_favail > 0 if counted else None,
        "How many more blocks and directories fit, whatever their size.",
    )


def _about_machine() -> Iterator[Finding]:
    nodes = _numa_nodes()
    yield Finding(
        "NUMA nodes",
        "not visible" if nodes is None else str(nodes),
        None,
        "With more than one it matters near which memory I/O threads run.",
    )
    name = _native.crc32c_implementation()
    yield Finding(
        "CRC32C",
        name,
        name != "portable",
        "Checksums are made by the processor's instructions, at next to no cost."
        if name != "portable"
        else "This processor has no CRC32C instructions kvio knows; checksums cost time.",
    )


def _numa_nodes() -> int | None:
    """Count the nodes of a list like ``0-1,4``."""
    try:
        with open(_NODES, encoding="ascii") as file:
            ranges = [part.split("-") for part in file.read().strip().split(",")]
        return sum(int(part[-1]) - int(part[0]) + 1 for part in ranges)
    except (OSError, ValueError):
        return None


def _calibration(path: str, medium: Medium) -> Finding:
    source = os.path.join(path, CALIBRATION_NAME)
    if not medium.direct_io:
        return Finding("calibration", "not needed", None, "There is one I/O mode to choose from.")
    try:
        reason = load_calibration(read_calibration(path), source).reason
    except FileNotFoundError:
        meaning = "The hybrid backend goes by default thresholds; kvio tune measures better ones."
        return Finding("calibration", "none", None, meaning)
    except (OSError, ValueError, KvioError) as exc:
        meaning = f"The hybrid backend does not open until it is made anew: {exc}."
        return Finding("calibration", "unreadable", False, meaning)
    return Finding("calibration", reason, True, "The hybrid backend goes by what was measured.")


def _tried(name: str, status: int, yes: str, no: str) -> Finding:
    if status == 0:
        return Finding(name, "yes", True, yes)
    return Finding(name, _refusal(status), False, no)


def _refusal(status: int) -> str:
    if not status:
        return "no effect"
    # Python calls this number by its other name.
    name = "EOPNOTSUPP" if status == -errno.EOPNOTSUPP else errno.errorcode.get(-status, status)
    return f"no ({name})"


def _recommend(path: str, medium: Medium, permissions: Finding) -> tuple[str, tuple[str, ...]]:
    advice = []
    backend = "hybrid" if medium.direct_io else "posix-tmpfile"
    if not permissions.good:
        advice.append(
            "Make a directory of your own here for the store, as create=true does, or chmod go-w "
            "this one; "
            "shared_root=true trusts everybody who may write here."
        )
    if medium.direct_io:
        advice.append("Run kvio tune on it once: it measures when to bypass the page cache.")
    if medium.not_durable_because is None:
        advice.append("Add ?durability=durable where a block must survive a power loss.")
    elif medium.in_memory:
        advice.append("Good for a cache; nothing here survives a power loss.")
    else:
        advice.append(
            "Add ?durability=durable&trust_fsync=true only if you know that the server below "
            "really syncs."
        )
    own = "" if permissions.good else "/kvio?create=true"
    return f"{backend}://{quote(path.rstrip('/') if own else path)}{own}", tuple(advice)


def _try_opening(url: StoreURL, path: str, permissions: Finding) -> Finding:
    """Open such a store in a directory of its own, because opening a durable one makes more."""
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
    return Finding(name, "opens", True, "The medium can do what its options ask for.")


def _try_reading(target: str) -> Finding:
    """Open a store that cannot be written to, which changes nothing."""
    name = "a store by this URL"
    try:
        open_store(target).close()
    except KvioError as exc:
        return Finding(name, "does not open", False, f"{exc}.")
    return Finding(name, "opens read-only", True, "What is stored there can be read.")


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
    yield Finding("medium", can.medium or "not told", None, "Keeps the blocks.")
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
            "A block survives a power loss, if asked to.",
            "A block may be lost with the power.",
        ),
        (
            "checksums",
            can.checksum,
            "Reads verify what was written.",
            "Reads do not notice damage.",
        ),
        (
            "shared",
            can.shared,
            "Other processes see what is stored.",
            "Other processes do not see what is stored.",
        ),
        (
            "use after fork",
            can.usable_after_fork,
            "A forked child may use the store of its parent.",
            "A forked child has to open a store of its own.",
        ),
    )
    for name, promised, meaning, otherwise in promises:
        answer = "promised" if promised else "not promised"
        yield Finding(name, answer, promised, meaning if promised else otherwise)


def _without_options(url: StoreURL) -> str:
    return f"{url.scheme}://{url.host}{quote(url.path)}"
