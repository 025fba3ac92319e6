"""The options of the POSIX backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvio._native import PRIVATE
from kvio.errors import ConfigError
from kvio.filesystem.permissions import check_dir_mode, check_file_mode
from kvio.types import Durability, KiB, Layout, MiB, Verify, check_namespace
from kvio.url import PermissionBits, StoreURL, typed_options

_STEP = 64 * KiB  # the largest alignment kvio knows; every chunk is a multiple of it
_FILE_MODE = PermissionBits(PRIVATE.file_mode)
_DIR_MODE = PermissionBits(PRIVATE.dir_mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixOptions:
    """The options of a POSIX store.

    Attributes:
        root: the directory that holds the store.
        durability: the level every write reaches: ``visible`` or ``durable``.
        layout: ``block`` (hashed directories, trailer) or ``plain`` (path = key, bytes exact).
        verify: the check of a read: ``full`` (checksum), ``length`` (trailer only), ``off``.
        checksum: the checksum of a write: ``crc32c`` or ``none``.
        publish: ``tmpfile`` (O_TMPFILE and linkat), ``rename`` (a named temporary), or ``auto``.
        chunk_bytes: at most this much in one system call.
        segment_bytes: size of the bounce buffers; under direct I/O a large block whose memory is
            not aligned is transferred in segments of about this size by several threads.
        namespace: goes into every trailer; blocks of another namespace are refused.
        create: make the root and missing directories above it, with ``dir_mode``.
        file_mode: permission bits of a block's file, such as 0o640; in a URL, octal digits.
        dir_mode: permission bits of directories that the store makes, such as 0o2770. Where others
            may use them, directories of this user that lack some of these bits get them too.
        group: name or number of the group of both; ``none``: the system's choice.
        shared_root: accept a root that others may write to, or that is not ours. A root that is
            writable by those for whom ``dir_mode`` says so is accepted too, if it is ours.
        trust_fsync: promise ``durable`` on a file system whose fsync cannot be judged (FUSE, NFS).
        read_only: True: refuse every write; False: refuse to open a root that cannot be written;
            ``none``: open such a root read-only.
        calibration: ``auto`` uses the calibration of ``kvio tune`` in the root, ``none`` does not.
    """

    root: str
    durability: Durability = "visible"
    layout: Layout = "block"
    verify: Verify = "full"
    checksum: Literal["crc32c", "none"] = "crc32c"
    publish: Literal["auto", "tmpfile", "rename"] = "auto"
    chunk_bytes: int = 16 * MiB
    segment_bytes: int = 4 * MiB
    namespace: str = ""
    create: bool = False
    file_mode: PermissionBits = _FILE_MODE
    dir_mode: PermissionBits = _DIR_MODE
    group: str | int | None = None
    shared_root: bool = False
    trust_fsync: bool = False
    read_only: bool | None = None
    calibration: Literal["auto", "none"] = "auto"

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "segment_bytes"):
            value = getattr(self, name)
            if value < _STEP or value % _STEP or value > 0x7FFF0000:
                raise ConfigError(f"option {name!r} must be a multiple of 64 KiB below 2 GiB")
        check_namespace(self.namespace)
        check_file_mode(self.file_mode)
        check_dir_mode(self.dir_mode)
        if not self.root.startswith("/") or "\0" in self.root:
            raise ConfigError(f"option 'root' must be an absolute path, not {self.root!r:.80}")


def options_from_url(url: StoreURL) -> PosixOptions:
    """Read options from ``scheme:///path?option=value``; the path is the root.

    Raises:
        ConfigError: an option or the path is wrong.
    """
    if url.host:
        raise ConfigError(
            f"{url.scheme}://{url.host}{url.path}: a file system URL has three slashes, "
            f"{url.scheme}:///absolute/path"
        )
    options = dict(url.options)
    if url.path:
        if "root" in options:
            raise ConfigError("the root is given twice, as path and as option")
        options["root"] = url.path
    if "root" not in options:
        raise ConfigError(f"{url.scheme} needs a root: {url.scheme}:///absolute/path or root=")
    return typed_options(PosixOptions, options)
