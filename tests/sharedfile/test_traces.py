"""What the kernel is asked to do when several processes write one file, seen by strace."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

import kvio
from kvio.sharedfile import SharedFile
from tests.sharedfile.writers import odd_sizes

pytestmark = pytest.mark.slow

WRITERS = 4
BLOCK = 4096
#: From 2 MiB a writer on, hybrid chooses direct.
SIZES = {"buffered": 1_000_003, "direct": 1_000_003, "hybrid": 9_000_001}
CALLS = (
    "openat,write,pwrite64,writev,pwritev,pwritev2,fcntl,fdatasync,fsync,sync_file_range,"
    "fallocate,ftruncate,renameat2,linkat,unlinkat,close,dup,dup2,mmap"
)
_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2")


class Call(NamedTuple):
    """One system call of a process, in the order of the trace."""

    number: int
    pid: int
    name: str
    text: str

    @property
    def descriptor(self) -> str:
        """The descriptor it is about, and what that refers to, as strace writes both."""
        return re.split(r"[,)]", self.text, maxsplit=1)[0].strip()

    @property
    def result(self) -> str:
        """What it gave."""
        return self.text.rpartition(" = ")[2]

    @property
    def about_data(self) -> bool:
        """Whether its descriptor is that of the data, whatever its name is by now."""
        return bool(re.match(r"\d+<[^>]*(\.kvio-data|/f)>", self.text))

    @property
    def span(self) -> tuple[int, int]:
        """Where a write began, and how many bytes it wrote."""
        offset = re.search(r", (\d+)(, 0)? *\) *= \d+$", self.text)
        assert offset, self.text
        return int(offset[1]), int(self.result)


class Trace(NamedTuple):
    """What all processes did, and who was who."""

    calls: list[Call]
    creator: int

    def of(self, *names: str, data: bool = False) -> list[Call]:
        """Return the calls of a name, in order."""
        return [c for c in self.calls if c.name in names and (c.about_data or not data)]

    @property
    def writes(self) -> list[Call]:
        """Writes to the data by processes that do not seal."""
        return [c for c in self.of(*_WRITES, data=True) if c.pid != self.creator]

    @property
    def blocks(self) -> dict[int, set[int]]:
        """Which file blocks each process wrote bytes of before the seal."""
        found: dict[int, set[int]] = {}
        for call in self.writes:
            start, nbytes = call.span
            last = (start + nbytes - 1) // BLOCK
            found.setdefault(call.pid, set()).update(range(start // BLOCK, last + 1))
        return found


def lines_of(log: Path) -> Iterator[Call]:
    """Yield whole calls; one that another process cut in two stands where it ended."""
    begun: dict[int, str] = {}
    for number, line in enumerate(log.read_text().splitlines()):
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[int(pid)] = rest.removesuffix("<unfinished ...>")
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", rest)
        if resumed:
            rest = begun.pop(int(pid)) + resumed[1]
        call = re.match(r"(\w+)\((.*)$", rest)
        if call:
            yield Call(number, int(pid), call[1], call[2])


@pytest.fixture(scope="module", params=["buffered", "direct", "hybrid"])
def mode(request: pytest.FixtureRequest) -> str:
    """Name a mode."""
    return str(request.param)


@pytest.fixture(scope="module")
def trace(mode: str, disk_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Let four processes write unaligned domains under strace, and see the file whole."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    root = Path(tmp_path_factory.mktemp("trace"))
    if not root.is_relative_to(disk_parent):
        pytest.skip(f"{root} is not below {disk_parent}")
    path, log, size = root / "f", root / "log", SIZES[mode]
    try:
        SharedFile.create(path, size, mode=mode).abort()
    except kvio.ConfigError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    done = subprocess.run(
        [
            *("strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={CALLS}"),
            *(sys.executable, "-m", "tests.sharedfile.writers"),
            *(str(path), mode, str(WRITERS), str(size)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if "ptrace" in done.stderr or "PTRACE" in done.stderr:
        pytest.skip(f"strace is not allowed to trace here: {done.stderr.strip():.200}")
    assert done.returncode == 0, done.stderr
    expected = b"".join(bytes([65 + i]) * n for i, n in enumerate(odd_sizes(size, WRITERS)))
    assert path.read_bytes()[:size] == expected
    calls = list(lines_of(log))
    return Trace(calls, calls[0].pid)


def test_no_two_processes_write_inside_one_block(trace: Trace) -> None:
    """Before the seal every file block is written by one process at most, and nearly all are."""
    blocks = trace.blocks
    assert len(blocks) == WRITERS
    for (a, of_a), (b, of_b) in combinations(blocks.items(), 2):
        assert not of_a & of_b, f"{a} and {b} wrote the same blocks"


def test_only_shared_blocks_are_left_to_the_seal(trace: Trace, mode: str) -> None:
    """What domains cut is written by whoever seals, whole, and nothing else of the payload is."""
    size = SIZES[mode]
    starts = [sum(odd_sizes(size, WRITERS)[:rank]) for rank in range(1, WRITERS)]
    cut = {at // BLOCK for at in starts if at % BLOCK}
    payload = set(range(-(-size // BLOCK)))
    written = set.union(*trace.blocks.values())
    assert payload - written == cut

    sealed = [c.span for c in trace.of(*_WRITES, data=True) if c.pid == trace.creator]
    own = {at // BLOCK for at, nbytes in sealed if at < size for _ in range(nbytes)}
    assert own == cut
    assert all(at % BLOCK == 0 and nbytes % BLOCK == 0 for at, nbytes in sealed if at < size)


def test_nobody_writes_the_data_in_another_way(trace: Trace, mode: str) -> None:
    """No writable mapping of it; in direct mode every write is of whole blocks."""
    maps = [c for c in trace.of("mmap") if ".kvio-data" in c.text]
    assert maps == []
    if mode != "buffered":
        for call in trace.of(*_WRITES, data=True):
            start, nbytes = call.span
            assert start % BLOCK == nbytes % BLOCK == 0, call.text


def test_no_descriptor_mixes_buffered_and_direct(trace: Trace, mode: str) -> None:
    """Each is made direct before its first write, and stays as it is; so does the sealing one."""
    flags: dict[tuple[int, str], list[Call]] = {}
    for call in trace.of("fcntl", data=True):
        if "F_SETFL" in call.text:
            flags.setdefault((call.pid, call.descriptor), []).append(call)
    opened = [c for c in trace.of("openat") if '.f.kvio-data"' in c.text and "RDWR" in c.text]
    assert len(opened) == 1 + WRITERS
    if mode == "buffered":
        assert not any("O_DIRECT" in c.text for calls in flags.values() for c in calls)
        assert not any("O_DIRECT" in c.text for c in opened)
        return
    for call in trace.of(*_WRITES, data=True):
        (only,) = flags[call.pid, call.descriptor]
        assert "O_DIRECT" in only.text
        assert only.number < call.number


def test_the_sealing_descriptor_is_older_than_every_write(trace: Trace) -> None:
    """It was opened before the first byte was written, so that it sees every error since."""
    rename = next(c for c in trace.of("renameat2") if '.kvio-data"' in c.text)
    syncs = [c for c in trace.of("fdatasync", data=True) if c.pid == trace.creator]
    sealing = [c for c in syncs if c.number < rename.number][-1]
    fd = sealing.descriptor.partition("<")[0]
    (opened,) = [
        c
        for c in trace.of("openat")
        if c.pid == trace.creator and '.f.kvio-data"' in c.text and c.result.startswith(f"{fd}<")
    ]
    assert "O_CREAT" in opened.text
    assert opened.number < min(c.number for c in trace.of(*_WRITES, data=True))
    between = [
        c
        for c in trace.of("close")
        if c.pid == trace.creator and opened.number < c.number < sealing.number
    ]
    assert not [c for c in between if c.descriptor.startswith(f"{fd}<") and ".kvio-data" in c.text]


def test_a_seal_writes_syncs_names_and_syncs_the_directory(trace: Trace) -> None:
    """In this order: the last write, fdatasync, rename, fsync of the directory, the map goes."""
    write = max(c.number for c in trace.of(*_WRITES, "ftruncate", data=True))
    sync = [c for c in trace.of("fdatasync", data=True) if c.pid == trace.creator][-1]
    (rename,) = [c for c in trace.of("renameat2") if '.kvio-data"' in c.text]
    directory = [
        c for c in trace.of("fsync") if c.pid == trace.creator and c.number > rename.number
    ]
    gone = [c for c in trace.of("unlinkat") if '.kvio-map"' in c.text]
    assert {call.result for call in (sync, rename, *directory)} == {"0"}
    assert write < sync.number < rename.number < directory[0].number < gone[-1].number


def test_every_writer_syncs_what_it_wrote(trace: Trace) -> None:
    """Once, after its last write, through the descriptor that wrote."""
    for pid in trace.blocks:
        writes = [c for c in trace.writes if c.pid == pid]
        (sync,) = [c for c in trace.of("fdatasync", data=True) if c.pid == pid]
        assert {c.descriptor for c in writes} == {sync.descriptor}
        assert writes[-1].number < sync.number


def test_blocks_are_allocated_before_the_first_write(trace: Trace) -> None:
    """All of them, by one call."""
    (allocated,) = trace.of("fallocate", data=True)
    assert allocated.number < min(c.number for c in trace.of(*_WRITES, data=True))
