"""Raw views of kvio's own media, written from docs/format.md without kvio's code."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import kvio
from kvio.testing.hooks import BackendHooks
from kvio.types import KiB, MiB

#: File systems that are no disk.
IN_MEMORY = ("tmpfs", "ramfs")
FAN_OUT = [f"{high:x}/{low:x}" for high in range(16) for low in range(16)]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to open a POSIX store."""

    backend: str
    publish: str
    layout: str
    durability: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.publish}-{self.layout}-{self.durability}"

    @property
    def needs_disk(self) -> bool:
        """Direct I/O and durability mean nothing in memory."""
        return self.backend == "posix-direct" or self.durability == "durable"

    @property
    def needs_journal(self) -> bool:
        """Durable blocks are synced without a name on a disk with a journal alone."""
        return (self.publish, self.durability) == ("tmpfile", "durable")

    def url(self, root: Path, **options: object) -> str:
        """Return the URL of a store below *root*; small limits make small blocks cross them."""
        given = {
            "publish": self.publish,
            "layout": self.layout,
            "durability": self.durability,
            "chunk_bytes": 128 * KiB,
            "segment_bytes": 64 * KiB,
            **options,
        }
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return f"{self.backend}://{root}?{query}"


class PosixHooks(BackendHooks):
    """A POSIX store of one variant, and its files."""

    variant: Variant

    def open(self, tmp_path: Path) -> kvio.Store | str:
        """Return the URL of the store below *tmp_path*."""
        root = tmp_path / "root"
        root.mkdir(mode=0o700, exist_ok=True)
        return self.variant.url(root)

    @property
    def nested_keys(self) -> bool:  # type: ignore[override]  # depends on the variant
        """A path cannot be a file and a directory."""
        return self.variant.layout == "block"

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]  # depends on the variant
        """Every boundary; fewer of them where each write waits for the disk."""
        if self.variant.durability == "durable":
            return (0, 1, 64, 4095, 4096, 4097, 64 * KiB + 1, 256 * KiB, MiB + 1)
        return (
            *super().sizes,
            *(128 * KiB - 1, 128 * KiB, 128 * KiB + 1, 256 * KiB - 65, 256 * KiB - 64, 256 * KiB),
        )

    @property
    def large_sizes(self) -> tuple[int, ...]:  # type: ignore[override]  # depends on the variant
        """Around the default thresholds of hybrid; one where each write waits for the disk."""
        if self.variant.durability == "durable":
            return (9 * MiB + 5,)
        return (2 * MiB - 1, 2 * MiB, 4 * MiB + 1, 8 * MiB, 9 * MiB + 5)

    def path_of(self, store: kvio.Store, key: str) -> Path:
        """Find a block's file; where it would be, if there is none."""
        root = Path(store.url.path)
        if self.variant.layout == "plain":
            return root / key
        first = hashlib.blake2b(b"\0" + key.encode(), digest_size=16).digest()[0]
        return root / FAN_OUT[first] / key.replace("/", "~")

    def raw_stored(self, store: kvio.Store, key: str) -> bytes:
        """Read a block's file."""
        return self.path_of(store, key).read_bytes()

    def raw_get(self, store: kvio.Store, key: str) -> bytes | None:
        """Read a block's file and take the padding and the trailer off."""
        path = self.path_of(store, key)
        if not path.exists():
            return None
        stored = path.read_bytes()
        if self.variant.layout == "plain":
            return stored
        assert stored[-64:-56] == b"KVIOBLK\n"
        (nbytes,) = struct.unpack_from("<Q", stored, len(stored) - 48)
        assert not any(stored[nbytes:-64]), "the padding is not zero"
        return stored[:nbytes]

    def raw_put(self, store: kvio.Store, key: str, stored: bytes) -> None:
        """Write a block's file over."""
        self.path_of(store, key).write_bytes(stored)

    def raw_leftovers(self, store: kvio.Store) -> list[str]:
        """Name every file of the store that begins with a dot."""
        return [str(path) for path in Path(store.url.path).rglob(".*")]


class MemoryHooks(BackendHooks):
    """A memory store, and its dictionary."""

    def open(self, tmp_path: Path) -> kvio.Store | str:  # noqa: ARG002  # memory has no directory
        """Return the only URL there is."""
        return "memory://"

    def raw_get(self, store: kvio.Store, key: str) -> bytes | None:
        """Look into the dictionary."""
        block = store._backend._blocks.get(key)  # type: ignore[attr-defined]  # peeking
        return None if block is None else bytes(block.data)


def remove_files(directory: Path) -> None:
    """Remove every file below a directory, and no directory."""
    for parent, _, names in os.walk(directory):
        for name in names:
            os.unlink(os.path.join(parent, name))


def filesystem_of(path: Path) -> str:
    """Name the file system a directory is on, as the kernel's mount table does."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return "unknown"
