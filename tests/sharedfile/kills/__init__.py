"""What tests of dying and failing writers share: cases, lives, and raw looks at files."""

from __future__ import annotations

import os
import random
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import google_crc32c

import kvio
from kvio.sharedfile import SharedFile

KiB: Final = 1024
WRITERS: Final = 3
_CELL_BYTES: Final = 64 * KiB
_FILE_MODE: Final = 0o440
_TRAILER = struct.Struct("<8sHHI16sQQQIIII20x")


@dataclass(frozen=True)
class Case:
    """One mode and one layout, and a file size at which they mean something.

    Attributes:
        piece: how many bytes a writer hands over at a time: no whole number of blocks.
    """

    mode: str
    layout: str
    size: int = 400_001
    piece: int = 50_001
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.mode}-{self.layout}"

    @property
    def payload(self) -> bytes:
        """What the file must hold."""
        return pattern(self.size)

    def create(self, path: Path, **more: Any) -> SharedFile:
        """Make a file of this case."""
        choices: dict[str, Any] = {"mode": self.mode, "cell_bytes": _CELL_BYTES}
        choices["file_mode"] = _FILE_MODE
        choices |= {**self.options, **more}
        return SharedFile.create(path, self.size, writers=WRITERS, **choices)


def _cases() -> Iterator[Case]:
    for mode in ("buffered", "direct", "hybrid"):
        # From 2 MiB a writer on, hybrid chooses direct.
        size, piece = (6_400_001, 800_001) if mode == "hybrid" else (400_001, 50_001)
        third = size // 3
        odd = (third + 777, third - 1777, size - 2 * third + 1000)
        yield Case(mode, "contiguous", size, piece)
        yield Case(mode, "round-robin", size, piece, {"stripe_bytes": 72 * KiB})
        yield Case(mode, "odd-sizes", size, piece, {"sizes": odd})


def _beside(case: Case) -> Case:
    return replace(case, layout="sidecar", options={"layout": "plain", "sidecar": True})


_WITHIN: Final = tuple(_cases())
#: Each mode with its checksums in the file, and last with those beside it.
CASES: Final = (*_WITHIN, *(_beside(case) for case in _WITHIN[::3]))
_PATTERN = random.Random(6).randbytes(8_000_000)


def pattern(nbytes: int) -> bytes:
    """Return the same random bytes each time."""
    return _PATTERN[:nbytes]


# Writing.


def pieces(file: SharedFile, rank: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a rank's domain into pieces that keep to no block."""
    for start, length in file.domain(rank):
        for at in range(start, start + length, nbytes):
            yield at, min(at + nbytes, start + length)


def write_domain(file: SharedFile, rank: int, case: Case) -> None:
    """Write all of a rank's domain, not in order."""
    todo = list(pieces(file, rank, case.piece))
    random.Random(rank).shuffle(todo)
    for start, end in todo:
        file.pwrite(case.payload[start:end], start)


def write_missing(file: SharedFile, rank: int | None, payload: bytes) -> int:
    """Write what `missing` reports; how many bytes that were."""
    owed = file.missing(rank)
    for _, offset, nbytes in owed:
        file.pwrite(payload[offset : offset + nbytes], offset)
    return sum(piece.nbytes for piece in owed)


# Lives: what a process does with a file.


def whole_life(path: Path, case: Case) -> None:
    """Create, write by every rank's own handle and by the creator's, seal."""
    with case.create(path) as file:
        for rank in range(1, WRITERS):
            with SharedFile.open(path, rank) as writer:
                write_domain(writer, rank, case)
        write_domain(file, 0, case)
        file.seal()


def short_life(path: Path, case: Case) -> None:
    """Create, write a part, abort."""
    file = case.create(path)
    write_domain(file, 1, case)
    file.abort()


def second_life(path: Path, case: Case) -> None:
    """Go on with what a dead creator left, and seal it."""
    with SharedFile.recover(path) as file:
        write_missing(file, None, case.payload)
        file.seal()


def leave_half(path: Path, case: Case) -> None:
    """Let a process die that has written some and not all."""

    def work() -> None:
        file = case.create(path)
        write_domain(file, 1, case)
        start, end = next(pieces(file, 0, case.piece))
        file.pwrite(case.payload[start:end], start)
        os.kill(os.getpid(), signal.SIGKILL)

    assert killed(in_child(work))


# Processes.


def in_child(work: Callable[[], None]) -> int:
    """Run *work* in a forked child; its wait status."""
    return wait_for(start(work))


def start(work: Callable[[], None]) -> int:
    """Run *work* in a forked child; its process."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  # whatever it is, it is shown
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def wait_for(pid: int) -> int:
    """Wait for a child; its wait status."""
    return os.waitpid(pid, 0)[1]


def killed(status: int) -> bool:
    """Return whether a child was killed; one that neither died of it nor succeeded is a failure."""
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed instead of being killed"
    return False


def end_well(pids: list[int]) -> None:
    """Wait for all of some children, none of which may fail."""
    ends = [killed(wait_for(pid)) for pid in pids]
    assert not any(ends)


# The file system, without kvio's code.


def crc32c(data: bytes) -> int:
    """Compute CRC32C by a published library."""
    return int(google_crc32c.value(data))


class Ending(NamedTuple):
    """What the trailer of a sealed file says."""

    writers: int
    size: int
    stripe_bytes: int
    cells: int
    cell_bytes: int
    align: int
    nsizes: int


def _ending(content: bytes) -> tuple[Ending, bytes]:
    head, crc = content[-96:-4], content[-4:]
    assert struct.unpack("<I", crc)[0] == crc32c(head), "the trailer is torn"
    (magic, version, flags, writers, _, size, stripe_bytes, cells, cell_bytes, align, nsizes,
     table_crc) = _TRAILER.unpack(head)  # fmt: skip
    assert (magic, version, flags) == (b"KVIOSHF\n", 1, 1)
    table = content[-96 - 8 * nsizes - 4 * cells : -96]
    assert table_crc == crc32c(table), "the index is torn"
    return Ending(writers, size, stripe_bytes, cells, cell_bytes, align, nsizes), table


def _cells(ending: Ending, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    step, start = ending.stripe_bytes, 0
    lengths = (
        sizes if not step else [min(step, ending.size - at) for at in range(0, ending.size, step)]
    )
    for length in lengths:
        stop, at = start + length, start
        while at < stop:
            origin = start // ending.align * ending.align
            end = origin + ((at - origin) // ending.cell_bytes + 1) * ending.cell_bytes
            yield at, min(end, stop)
            at = min(end, stop)
        start = stop


def check_whole(path: Path, payload: bytes) -> None:
    """Check every byte of a sealed file: payload, padding, checksums, trailer."""
    content = path.read_bytes()
    beside = sidecar_of(path)
    if beside.exists():
        ending, table = _ending(beside.read_bytes())
        assert content == payload, f"{path} is torn"
        assert beside.stat().st_size == 64 + len(table) + 96
        assert beside.stat().st_mode == path.stat().st_mode
    else:
        ending, table = _ending(content)
        assert content[: ending.size] == payload, f"{path} is torn"
        assert not any(content[ending.size : -96 - len(table)]), "the padding is not zero"
    assert ending.size == len(payload)
    sizes = struct.unpack(f"<{ending.nsizes}Q", table[: 8 * ending.nsizes])
    sums = struct.unpack(f"<{ending.cells}I", table[8 * ending.nsizes :])
    assert sums == tuple(crc32c(payload[a:b]) for a, b in _cells(ending, sizes))
    assert path.stat().st_mode & 0o7777 in (_FILE_MODE, sealed_mode())


def check_name(path: Path, payload: bytes) -> bool:
    """Check that the final name is absent, or whole and readable; whether it stands."""
    if not path.exists():
        return False
    check_whole(path, payload)
    out = bytearray(len(payload))
    with SharedFile.open(path) as file:
        file.pread_into(out)
    assert out == payload
    return True


def forge_boot(map_path: Path) -> None:
    """Let a map say that it was made before the machine was started."""
    content = bytearray(map_path.read_bytes())
    writers = struct.unpack_from("<I", content, 12)[0]
    nsizes = struct.unpack_from("<Q", content, 72)[0]
    content[32:48] = bytes(byte ^ 0xFF for byte in content[32:48])
    sizes_at = 192 + 16 * writers
    covered = content[:124] + content[sizes_at : sizes_at + 8 * nsizes]
    struct.pack_into("<I", content, 124, crc32c(bytes(covered)))
    map_path.write_bytes(content)


def map_of(path: Path) -> Path:
    """Return the path of a file's map while it is written."""
    return path.with_name(f".{path.name}.kvio-map")


def sidecar_of(path: Path) -> Path:
    """Return where the checksums of a plain sealed file lie."""
    return path.with_name(f".{path.name}.kvio-sums.{path.stat().st_ino:016x}")


def names_of(path: Path) -> list[str]:
    """List the names that a sealed file has, none if there is no file: what may stay of it."""
    if not path.exists():
        return []
    beside = sidecar_of(path)
    return sorted([path.name, beside.name] if beside.exists() else [path.name])


def remove(path: Path) -> None:
    """Remove a sealed file with all its names."""
    for name in names_of(path):
        path.with_name(name).unlink()


def sealed_mode() -> int:
    """Return the permissions of a sealed file by default: what the umask leaves of reading."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o400 | 0o444 & ~umask


def data_of(path: Path) -> Path:
    """Return the path of a file's bytes while it is written."""
    return path.with_name(f".{path.name}.kvio-data")


def need_direct(case: Case, root: Path) -> str | None:
    """Return why a case cannot be run below a directory; None: it can."""
    try:
        case.create(root / "probe").abort()
    except kvio.ConfigError as exc:
        return str(exc)
    return None
