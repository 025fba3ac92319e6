"""The tmpfile experiment writes what it says, publishes as it says, and checks every byte."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness.machine import describe_file_system
from benchmarks.harness.run import Limits, Progress
from benchmarks.scenarios import tmpfile
from benchmarks.scenarios.tmpfile import (
    BACKENDS,
    BASELINES,
    CONTENDERS,
    REFERENCE,
    Baseline,
    Case,
    Source,
    compile_program,
)
from kvio import KiB, MiB

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)

#: Logs each step that makes a file safe or its name appear, and what can be seen just before.
SPY = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#define NEXT(call) reinterpret_cast<decltype(&call)>(dlsym(RTLD_NEXT, #call))
static void log_publish(const char *step, const char *from, const char *to) {
    struct stat now = {}, target;
    int missing = stat(from, &now), free = lstat(to, &target), mode = now.st_mode & 07777;
    fprintf(stderr, "%s %d %lld %o %d\n", step, missing, (long long)now.st_size, mode, free);
}
extern "C" int rename(const char *from, const char *to) noexcept {
    log_publish("rename", from, to);
    return NEXT(rename)(from, to);
}
extern "C" int linkat(int a, const char *from, int b, const char *to, int flags) noexcept {
    log_publish("linkat", from, to);
    return NEXT(linkat)(a, from, b, to, flags);
}
#define SPY_ON(sync) extern "C" int sync(int fd) { \
    struct stat now; fstat(fd, &now); \
    fprintf(stderr, #sync " %s\n", S_ISDIR(now.st_mode) ? "directory" : "file"); \
    return NEXT(sync)(fd); }
SPY_ON(fdatasync)
SPY_ON(fsync)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the baselines once."""
    target = tmp_path_factory.mktemp("program") / "filewriter"
    compile_program(target)
    return target


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that logs; see `SPY`."""
    source = tmp_path_factory.mktemp("spy") / "spy.cpp"
    source.write_text(SPY)
    target = source.with_suffix(".so")
    command = ("c++", "-shared", "-fPIC", "-o", target, source, "-ldl")
    if shutil.which("c++") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("needs c++ and glibc's dlsym to look over the program's shoulder")
    return target


@pytest.fixture
def source() -> Iterator[Source]:
    """Yield noise for two files of any size up to 1 MiB and a bit."""
    memory = Source(memoryview(os.urandom(2 * MiB + 2 * KiB)))
    yield memory
    memory.close()


def _run(root: Path, results: Path, **options: Any) -> int:
    limits = Limits(root=root, results=results, max_rounds=1, max_bytes=4 * MiB)
    return tmpfile.run(limits, **{"threads": (1,), "file_bytes": MiB, **options})


def _recorded(results: Path) -> Any:
    return json.loads((results / "tmpfile.json").read_text())


def _alter_program(honest: str, broken: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmpfile.SOURCE.read_text()
    assert text.count(honest) == 1
    target = folder / "filewriter.cpp"
    target.write_text(text.replace(honest, broken))
    monkeypatch.setattr(tmpfile, "SOURCE", target)


@needs_compiler
def test_every_contender_takes_part_in_every_case(
    real_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sample is checked and says what its steps took; the root is left as it was."""
    assert _run(real_disk, tmp_path, threads=(1, 2)) == 0

    record = _recorded(tmp_path)
    left_out = str([note for note in record["notes"] if note.startswith("left out: ")])
    names = [name for name in CONTENDERS if f" {name}," not in left_out]
    assert set(names) >= {*BASELINES, "posix-tmpfile"}
    took_part = {(s["contender"], s["subject"], s["operation"]) for s in record["samples"]}
    for name in names:
        for subject in ("1 thread", "2 threads"):
            assert {(name, subject, sync) for sync in ("no sync", "durable")} <= took_part
    assert {sample["intact"] for sample in record["samples"]} == {True}
    assert {sample["block_nbytes"] for sample in record["samples"]} == {MiB}
    assert list(real_disk.iterdir()) == []
    said = capsys.readouterr().out
    assert all(word in said for word in (*names, "publish us", "x write+rename", "dirty MiB"))


@needs_compiler
def test_steps_are_reported_apart_and_fit_into_the_whole(real_disk: Path, tmp_path: Path) -> None:
    """Every file has its own times, of which no step is counted twice."""
    assert _run(real_disk, tmp_path, threads=(2,), contenders=(REFERENCE, "fwrite, tmpfile")) == 0

    samples = _recorded(tmp_path)["samples"]
    assert len(samples) == 4
    for sample in samples:
        facts = sample["facts"]
        for index, total_s in enumerate(sample["latencies_s"]):
            steps = [facts[name][index] for name in ("write_ns", "sync_ns", "publish_ns")]
            assert steps[0] > 0
            assert steps[2] > 0
            assert sum(steps) <= total_s * 1e9 + 1
            assert total_s <= sample["wall_s"] + 1e-9
        assert len(sample["latencies_s"]) == len(facts["publish_ns"]) == 2
        assert facts["dirty_kib_before"] >= 0
        assert facts["cached_after"] is None or 0 <= facts["cached_after"] <= 1


@needs_compiler
@pytest.mark.parametrize("sync", ["none", "durable"])
@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_leaves_whole_files_for_their_owner_alone(
    name: str, sync: str, program: Path, source: Source, tmp_path: Path
) -> None:
    """Each file has its own bytes, an odd number of them too, mode 0600, and no temporary."""
    size = MiB + 777
    written = Baseline(program, BASELINES[name], tmp_path).write(source, "a", Case(2, size, sync))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-0000", "a-0001"]
    for index in range(2):
        path = tmp_path / f"a-{index:04d}"
        assert path.read_bytes() == source.memory[index * size :][:size]
        assert path.stat().st_mode & 0o7777 == 0o600
    assert len(written.latencies_s) == 2


@needs_compiler
@pytest.mark.parametrize("name", BASELINES)
def test_a_name_appears_whole_between_the_two_syncs(
    name: str,
    program: Path,
    spy: Path,
    source: Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All bytes are in the file, and no name yet, when it is synced, published, synced again."""
    monkeypatch.setenv("LD_PRELOAD", str(spy))
    step = "rename" if name.endswith("rename") else "linkat"
    published = f"{step} 0 {MiB} 600 -1"
    for sync, expected in (
        ("none", [published]),
        ("durable", ["fdatasync file", published, "fsync directory"]),
    ):
        Baseline(program, BASELINES[name], tmp_path).write(source, sync, Case(1, MiB, sync))

        assert capfd.readouterr().err.splitlines() == expected


@needs_compiler
def test_a_step_that_fails_is_named(program: Path, source: Source, tmp_path: Path) -> None:
    """A taken name and a missing directory are errors with an errno, not times."""
    writer = Baseline(program, BASELINES["write 1 MiB, tmpfile"], tmp_path)
    writer.write(source, "a", Case(1, MiB, "none"))
    with pytest.raises(kvio.StorageError, match="linkat") as taken:
        writer.write(source, "a", Case(1, MiB, "none"))
    assert taken.value.errno == errno.EEXIST

    nowhere = Baseline(program, BASELINES[REFERENCE], tmp_path / "nowhere")
    with pytest.raises(kvio.StorageError, match="directory") as missing:
        nowhere.write(source, "a", Case(1, MiB, "none"))
    assert missing.value.errno == errno.ENOENT


@needs_compiler
def test_a_source_that_is_too_short_is_an_error(
    program: Path, source: Source, tmp_path: Path
) -> None:
    """No file is filled with what happened to be in memory."""
    writer = Baseline(program, BASELINES[REFERENCE], tmp_path)
    with pytest.raises(kvio.StorageError, match="too short"):
        writer.write(source, "a", Case(4, MiB, "none"))
    assert list(tmp_path.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize(
    ("honest", "broken"),
    [
        ("write(fd, data + done,", "write(fd, data + (done ? done - 1 : 0),"),
        ("if (options_.durable) sync_or_fail(fsync", "ftruncate(file_, 5);\n//"),
        ("if (rename(", 'close(creat((path_ + "x").c_str(), 0600));if (rename('),
    ],
    ids=["wrong bytes", "too short", "one file too many"],
)
def test_a_program_that_writes_something_else_is_noticed(
    honest: str,
    broken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 1, by name."""
    _alter_program(honest, broken, tmp_path, monkeypatch)

    options = {"file_bytes": 3 * MiB, "contenders": (REFERENCE,)}
    assert _run(tmp_path, tmp_path / "results", **options, syncs=("none",)) == 1
    assert f"BYTES DIFFER: {REFERENCE}" in capsys.readouterr().out


@needs_compiler
def test_baselines_go_on_without_what_has_no_o_tmpfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses an O_TMPFILE that is only to be read: named, and the rest is measured."""
    _alter_program("O_TMPFILE | O_WRONLY", "O_TMPFILE | O_RDONLY", tmp_path, monkeypatch)

    names = ("write whole, tmpfile", REFERENCE)
    assert _run(tmp_path, tmp_path, contenders=names, syncs=("none",)) == 0
    record = _recorded(tmp_path)
    assert {sample["contender"] for sample in record["samples"]} == {REFERENCE}
    assert (
        f"left out: {names[0]}, no sync: no usable O_TMPFILE: Invalid argument" in record["notes"]
    )


def test_a_store_that_writes_something_else_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte flipped in one of two blocks is exit status 1, although the store was content."""
    honest = kvio.Store.write_block

    def wrong(self: kvio.Store, key: str, data: Any, **options: Any) -> kvio.Receipt:
        copy = bytearray(data)
        copy[-1] ^= key.endswith("1")
        return honest(self, key, copy, **options)

    monkeypatch.setattr(kvio.Store, "write_block", wrong)

    assert _run(tmp_path, tmp_path / "r", threads=(2,), contenders=("posix-tmpfile",)) == 1
    assert "BYTES DIFFER: posix-tmpfile, 2 threads" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["CXX", "PATH"])
def test_without_a_compiler_kvio_is_measured_alone(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note says which compiler there is not."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(missing, "/nonexistent")

    assert _run(tmp_path, tmp_path, syncs=("none",)) == 0
    record = _recorded(tmp_path)
    measured = {sample["contender"] for sample in record["samples"]}
    assert "posix-tmpfile" in measured
    assert measured <= set(BACKENDS)
    reported = (
        "$CXX is '/nonexistent'" if missing == "CXX" else "none of c++, g++, clang++ is in $PATH"
    )
    assert any(note.startswith("left out") and reported in note for note in record["notes"])


@needs_compiler
def test_a_source_that_is_missing_or_wrong_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but baselines, and none of them: exit status 2 and the reason, no record."""
    monkeypatch.setattr(tmpfile, "SOURCE", tmp_path / "filewriter.cpp")
    assert _run(tmp_path, tmp_path / "results", contenders=(REFERENCE,)) == 2
    assert "filewriter.cpp" in capsys.readouterr().err

    (tmp_path / "filewriter.cpp").write_text("int main( {}")
    assert _run(tmp_path, tmp_path / "results", contenders=(REFERENCE,)) == 2
    assert "filewriter.cpp:1:" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_files_shrink_to_whole_mebibytes_that_fit_into_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as asked for where that fits, never under 1 MiB, and the notes tell the sizes."""
    monkeypatch.setenv("CXX", "/nonexistent")
    options = {"threads": (1, 3, 5), "file_bytes": 3 * MiB, "contenders": ("posix-tmpfile",)}
    assert _run(tmp_path, tmp_path, syncs=("none",), **options) == 0

    record = _recorded(tmp_path)
    sizes = {sample["subject"]: sample["block_nbytes"] for sample in record["samples"]}
    assert sizes == {"1 thread": 3 * MiB, "3 threads": MiB, "5 threads": MiB}
    (note,) = [note for note in record["notes"] if "SMALLER than 3 MiB" in note]
    assert "3 threads 1 MiB" in note


def test_a_file_is_50_mib_unless_limits_are_tighter() -> None:
    """The size of the change proposal for as many threads as the limit leaves it."""
    sizes = [tmpfile._file_bytes(50 * MiB, n, 160 * MiB) // MiB for n in (1, 3, 4, 16, 64, 500)]

    assert sizes == [50, 50, 40, 10, 2, 1]
    assert tmpfile._file_bytes(4 * KiB, 64, 4 * KiB) == 4 * KiB


def test_a_trial_leaves_no_bytes_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk holds one trial's files at most, however many contenders there are."""
    left: list[int] = []

    def say(_: Progress, _step: str) -> None:
        measured = (p for p in tmp_path.rglob("*") if p.is_file() and p.parent.name != "r")
        left.append(sum(p.stat().st_size for p in measured))

    monkeypatch.setattr(Progress, "say", say)

    assert _run(tmp_path, tmp_path / "r", contenders=("posix-tmpfile", "hybrid", REFERENCE)) == 0
    assert len(left) > 2
    assert set(left) == {0}


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record holds the turns that ended, and the root is left as it was."""

    def say(_: Progress, step: str) -> None:
        if "hybrid" in step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "say", say)
    results = tmp_path / "results"

    assert _run(tmp_path, results, contenders=("posix-tmpfile", "hybrid")) == 130
    assert {s["contender"] for s in _recorded(results)["samples"]} == {"posix-tmpfile"}
    assert list(tmp_path.iterdir()) == [results]


def test_what_a_medium_refuses_is_left_out_and_the_rest_measured(tmp_path: Path) -> None:
    """On tmpfs nothing is durable and nothing direct, and the notes say so."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or describe_file_system(shm).kind != "tmpfs":
        pytest.skip("needs tmpfs on /dev/shm")
    with tempfile.TemporaryDirectory(dir=shm) as root:
        assert _run(Path(root), tmp_path, syncs=("durable", "none"), contenders=BACKENDS) == 0
        assert os.listdir(root) == []

    record = _recorded(tmp_path)
    assert "posix-tmpfile" in {s["contender"] for s in record["samples"]}
    assert {s["operation"] for s in record["samples"]} == {"no sync"}
    for reported in ("left out: posix-tmpfile, durable: ", "NOT COMPARABLE: tmpfs is memory"):
        assert any(note.startswith(reported) for note in record["notes"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"threads": (4, 0)}, "threads"),
        ({"threads": ()}, "threads"),
        ({"threads": (2, 2)}, "threads"),
        ({"file_bytes": 0}, "file_bytes"),
        ({"syncs": ("sometimes",)}, "sometimes"),
        ({"contenders": ("writev, rename",)}, "writev, rename"),
        ({"contenders": ()}, "contender"),
        ({"root": Path("/nonexistent")}, "no such directory"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """The error names it."""
    with pytest.raises(kvio.ConfigError, match=named):
        _run(**{"root": tmp_path, "results": tmp_path / "results", **options})
    assert list(tmp_path.iterdir()) == []
