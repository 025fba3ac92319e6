"""What kvio's shared files are held against: a C program that is compiled here, and IOR."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import numpy as np
import pytest

import kvio
from benchmarks.scenarios.shared_file import scenario
from benchmarks.scenarios.shared_file.contenders import IOR, PROCESSES, Program, compile_program
from kvio import KiB

from .test_shared_file import recorded
from .test_shared_file_ranks import run_small


def _compiled(folder: Path) -> str:
    try:
        return compile_program(folder)
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))


@pytest.mark.parametrize("separate", [False, True])
def test_the_c_program_writes_what_it_is_given_where_it_is_asked_to(
    *, separate: bool, tmp_path: Path
) -> None:
    """Two writers, two blocks of two calls each; every byte of the files is as asked."""
    path = _compiled(tmp_path)
    source = np.random.default_rng(1).integers(0, 256, 64 * KiB, np.uint8)
    names = [str(tmp_path / f"f{number if separate else 0}") for number in range(2)]
    for name in names:
        Path(name).touch()
    starts = [[0, 16 * KiB], [0, 16 * KiB]] if separate else [[0, 32 * KiB], [16 * KiB, 48 * KiB]]
    run = Program(
        path,
        [(name, offsets, None) for name, offsets in zip(names, starts, strict=True)],
        direct=False,
        transfer_bytes=8 * KiB,
        block_bytes=16 * KiB,
    )
    try:
        run.load(source.data)
        window = run.go(time.monotonic())
    finally:
        run.close()

    assert len(window.latencies_s) == 8
    assert window.synced_s >= max(window.ended_s) >= max(window.started_s)
    blocks = source.reshape(4, 16 * KiB)
    if separate:
        assert (np.fromfile(names[0], np.uint8) == blocks[:2].ravel()).all()
        assert (np.fromfile(names[1], np.uint8) == blocks[2:].ravel()).all()
    else:
        expected = blocks[[0, 2, 1, 3]].ravel()
        assert (np.fromfile(names[0], np.uint8) == expected).all()


def test_the_c_programs_failures_are_reported(tmp_path: Path) -> None:
    """By the step and what the system said of it."""
    path = _compiled(tmp_path)
    writers = [(str(tmp_path / "nowhere" / "f"), [0], None)]
    run = Program(path, writers, direct=False, transfer_bytes=KiB, block_bytes=KiB)
    try:
        with pytest.raises(kvio.StorageError, match="open: No such file"):
            run.load(memoryview(bytes(KiB)))
    finally:
        run.close()


def test_without_a_compiler_the_c_program_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, with the reason; the others are measured, and exit is 0."""
    monkeypatch.setenv("CC", "no-such-compiler")
    assert run_small(tmp_path, tmp_path / "r", contenders=["C buffered", "python buffered"]) == 0
    record = recorded(tmp_path / "r")
    assert {s["contender"] for s in record["samples"]} == {"python buffered"}
    [note] = [note for note in record["notes"] if note.startswith("left out: C buffered")]
    assert "no-such-compiler" in note


_TABLES = (
    "access    bw(MiB/s)  IOPS       Latency(s)  block(KiB) xfer(KiB)  open(s)    wr/rd(s)   "
    "close(s)   total(s)   iter\n------    ----\nCommencing write performance test\n"
    "write     2000.0     2000.1     0.004       1024       1024       0.5        0.25       "
    "0.125      0.875      0\nread      1 2 3 4 5 6 7 8 9 0\n",
    "access    bw(MiB/s)  block(KiB) xfer(KiB)  open(s)    wr/rd(s)   close(s)   total(s)   iter\n"
    "write     2000.0     1024       1024       0.5        0.25       0.125      0.875      0\n",
)


@pytest.mark.parametrize("said", _TABLES)
def test_iors_table_is_read_by_its_headings(said: str) -> None:
    """Columns differ between versions."""
    assert scenario.written_s(said) == 0.25
    with pytest.raises(kvio.StorageError, match="nothing of its writes"):
        scenario.written_s("access bw(MiB/s)\n")


def test_ior_runs_on_the_same_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By mpirun, with as many ranks as there are writers; where its check fails, exit is 1."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    script = (
        f"#!/bin/sh\nprintf '%s ' \"$@\" >> {tmp_path}/called\ncat <<'END'\n{_TABLES[1]}{{}}END\n"
    )
    wrong = "WARNING: incorrect data on write.\n"
    for name, text in (("ior", ""), ("mpirun", script.format(wrong))):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(bin_), prepend=os.pathsep)

    assert run_small(tmp_path, tmp_path / "r", contenders=[IOR[1]], kinds=(PROCESSES,)) == 1
    [called] = (tmp_path / "called").read_text().splitlines()
    for words in ("-n 2 ", "-t 1048576", "-b 1048576", "-s 1", " -e ", " -W ", "--posix.odirect"):
        assert words in f"{called} "
    [sample] = recorded(tmp_path / "r")["samples"]
    assert (sample["intact"], sample["wall_s"], sample["operation"]) == (False, 0.25, "durable")


def test_without_ior_it_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; nothing else to measure is exit status 2."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_small(tmp_path, tmp_path / "r", contenders=list(IOR)) == 2
    with pytest.raises(kvio.UnsupportedError, match=r"ior is not in \$PATH"):
        scenario.find_ior()
