"""What others do with a sealed file: another user, and programs that know nothing of kvio."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from kvio import SharedFile

from . import kills
from .conftest import Create

STRANGER = 54321
VALUES = np.arange(30_000, dtype=np.float32)


def _write_safetensors() -> bytes:
    return bytes(pytest.importorskip("safetensors.numpy").save({"values": VALUES}))


def _read_safetensors(path: Path) -> Any:
    with pytest.importorskip("safetensors").safe_open(path, framework="numpy") as file:
        return file.get_tensor("values")


def _write_arrow() -> bytes:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"values": VALUES})
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _read_arrow(path: Path) -> Any:
    arrow = pytest.importorskip("pyarrow")
    with arrow.memory_map(str(path)) as source:
        return arrow.ipc.open_file(source).read_all()["values"].to_numpy()


def _write_parquet() -> bytes:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    parquet.write_table(arrow.table({"values": VALUES}), sink)
    return sink.getvalue()


def _read_parquet(path: Path) -> Any:
    with path.open("rb") as file:
        return pytest.importorskip("pyarrow.parquet").read_table(file)["values"].to_numpy()


def _write_npy() -> bytes:
    sink = io.BytesIO()
    np.save(sink, VALUES)
    return sink.getvalue()


def _read_npy(path: Path) -> Any:
    return np.load(path, mmap_mode="r")


def _read_memmap(path: Path) -> Any:
    return np.memmap(path, VALUES.dtype, mode="r")


PROGRAMS: dict[str, tuple[Callable[[], bytes], Callable[[Path], Any]]] = {
    "safetensors": (_write_safetensors, _read_safetensors),
    "pyarrow": (_write_arrow, _read_arrow),
    "parquet": (_write_parquet, _read_parquet),
    "numpy.load": (_write_npy, _read_npy),
    "numpy.memmap": (VALUES.tobytes, _read_memmap),
}


def seal(create: Create, payload: bytes, **options: Any) -> Path:
    """Seal a plain file with a sidecar, written by two ranks."""
    options = {"layout": "plain", "sidecar": True, "writers": 2, **options}
    with create("file", len(payload), **options) as file:
        file.pwrite(payload, 0)
        file.seal()
    return Path(file.path)


def by_another_user(path: Path, work: Callable[[], None]) -> None:
    """Do something as a user who may pass the directories of the file."""
    path.parent.chmod(0o755)

    def change() -> None:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        work()

    assert not kills.killed(kills.in_child(change))


def read_back(path: Path, payload: bytes) -> None:
    """Read and verify it by kvio."""
    out = bytearray(len(payload))
    with SharedFile.open(path) as file:
        file.pread_into(out)
    assert out == payload


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_plain_file_is_read_by_other_programs(create: Create, program: str) -> None:
    """They see the payload and no more; kvio verifies the same file."""
    write, read = PROGRAMS[program]
    payload = write()
    path = seal(create, payload)

    np.testing.assert_array_equal(read(path), VALUES)
    read_back(path, payload)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_plain_file_is_read_by_other_users(create: Create, program: str) -> None:
    """Under the umask that most have, with nothing asked for; kvio verifies it for them too."""
    write, read = PROGRAMS[program]
    payload = write()
    before = os.umask(0o022)
    try:
        path = seal(create, payload)
    finally:
        os.umask(before)

    def work() -> None:
        np.testing.assert_array_equal(read(path), VALUES)
        read_back(path, payload)

    read(path)  # what is imported late would be below directories of ours
    by_another_user(path, work)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
@pytest.mark.parametrize("layout", ["plain", "block"])
def test_a_file_of_a_group_is_read_by_no_one_else(create: Create, layout: str) -> None:
    """`group` and `file_mode` say who: a member reads it, another user does not."""
    payload = VALUES.tobytes()
    beside = layout == "plain"
    path = seal(create, payload, layout=layout, sidecar=beside, group=STRANGER, file_mode=0o440)
    by_another_user(path, lambda: read_back(path, payload))

    def refused() -> None:
        with pytest.raises(kvio.AccessDeniedError):
            SharedFile.open(path)

    path.chmod(0o400)
    by_another_user(path, refused)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
def test_a_group_that_this_user_is_not_in_is_refused(disk_path: Path) -> None:
    """An error that names it, and nothing is left."""
    disk_path.chmod(0o777)

    def work() -> None:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        with pytest.raises(kvio.AccessDeniedError, match="set group 0 of"):
            SharedFile.create(disk_path / "file", 1, group=0)
        assert os.listdir(disk_path) == []

    assert not kills.killed(kills.in_child(work))
