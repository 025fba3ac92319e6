"""Raw views of shared files, from docs/format.md and /proc, without kvio's code."""

from __future__ import annotations

import os
import random
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from google_crc32c import value

from tests.posix import faultlab

_TRAILER = struct.Struct("<8sHHI16sQQQIIII20xI")


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a sealed file says and holds."""

    payload: bytes
    file_id: bytes
    writers: int
    stripe_bytes: int
    cell_bytes: int
    align: int
    sizes: tuple[int, ...]
    checksums: tuple[int, ...] | None
    padding: bytes


def sealed(path: Path) -> Sealed:
    """Take a sealed file apart; what does not fit together is an AssertionError."""
    data = path.read_bytes()
    trailer = data[-_TRAILER.size :]
    (magic, version, flags, writers, file_id, size, stripe, cells, cell_bytes, align, nsizes,
     table_crc, crc) = _TRAILER.unpack(trailer)  # fmt: skip
    at = -(-size // align) * align
    table = data[at : -_TRAILER.size]
    assert (magic, version) == (b"KVIOSHF\n", 1)
    assert (crc, table_crc) == (value(trailer[:-4]), value(table))
    assert len(table) == 8 * nsizes + 4 * cells * flags
    words = struct.unpack_from(f"<{cells}I", table, 8 * nsizes) if flags else None
    return Sealed(
        payload=data[:size],
        file_id=file_id,
        writers=writers,
        stripe_bytes=stripe,
        cell_bytes=cell_bytes,
        align=align,
        sizes=struct.unpack_from(f"<{nsizes}Q", table),
        checksums=words,
        padding=data[size:at],
    )


def random_bytes(nbytes: int, seed: int = 1) -> bytes:
    """Return bytes that no two cells have alike."""
    return random.Random(seed).randbytes(nbytes)


def crc32c(data: bytes | bytearray) -> int:
    """Compute a CRC32C without kvio."""
    return int(value(bytes(data)))


def names(directory: Path) -> list[str]:
    """List a directory, hidden names too."""
    return sorted(os.listdir(directory))


def permissions(path: Path) -> int:
    """Return a file's permission bits."""
    return path.lstat().st_mode & 0o7777


def flip(path: Path, at: int, change: int = 1) -> None:
    """Change one byte of a file, whatever its permissions."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ change]))


def descriptors() -> Counter[str]:
    """Count what this process has open, by name, but for sockets."""
    return Counter(faultlab.open_descriptors().values())


def mapped(directory: Path) -> list[str]:
    """List the files below a directory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(directory) in line]


def threads() -> set[threading.Thread]:
    """Return the threads that are alive."""
    return set(threading.enumerate())
