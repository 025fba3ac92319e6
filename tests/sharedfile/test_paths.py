"""Paths that name no file, and what others put in the way: never followed, never waited for."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio import SharedFile

from . import raw
from .conftest import Create

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 50_000
DATA = raw.random_bytes(SIZE)


@pytest.mark.parametrize("verb", ["create", "open", "recover"])
def test_a_path_that_names_no_file_is_refused(disk_path: Path, verb: str) -> None:
    """An empty name, a directory's name or bytes are a ConfigError."""
    paths: list[Any] = ["", "/", ".", "..", "x/", "a\0b", "x/.", b"bytes"]
    for path in paths:
        whole = path if isinstance(path, bytes) or path == "/" else os.path.join(disk_path, path)
        with pytest.raises(kvio.ConfigError, match="does not name a file"):
            getattr(SharedFile, verb)(whole, *([1] if verb == "create" else []))


def test_a_name_that_is_too_long_is_refused(create: Create, disk_path: Path) -> None:
    """Temporary names need room: the message says how long a name may be."""
    with pytest.raises(kvio.ConfigError, match="longer than 207 bytes"):
        create("é" * 104, SIZE)
    with create("x" * 207, 10) as file:
        file.pwrite(bytes(10), 0)
        file.seal()

    assert raw.names(disk_path) == ["x" * 207]


def test_names_of_all_kinds(create: Create, disk_path: Path) -> None:
    """Blanks, line ends, a leading dash or dot, other alphabets and bytes that are no text."""
    odd = ["a b", "a\nb", "-x", ".hidden", "каша", "caf\udce9", "x.kvio-map", ".x.kvio-data"]
    for name in odd:
        with create(name, 10) as file:
            file.pwrite(bytes(10), 0)
            file.seal()

    assert raw.names(disk_path) == sorted(odd)


def test_no_directory_is_reported(disk_path: Path) -> None:
    """A directory that is not there, or is a file, is a StorageError that names the path."""
    (disk_path / "file").write_text("")
    calls: list[Callable[[Path], object]] = [
        lambda path: SharedFile.create(path, 1),
        SharedFile.open,
        SharedFile.recover,
    ]
    for path in (disk_path / "none" / "x", disk_path / "file" / "x"):
        for call in calls:
            with pytest.raises(kvio.StorageError, match="open the directory") as caught:
                call(path)
            assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR)


def test_nothing_there_is_reported(join: Create, disk_path: Path) -> None:
    """Opening, joining and recovering a name that nobody made is a BlockNotFoundError."""
    calls: list[Callable[[], object]] = [
        lambda: join("x"),
        lambda: join("x", 0),
        lambda: SharedFile.recover(disk_path / "x"),
    ]
    for call in calls:
        with pytest.raises(kvio.BlockNotFoundError, match="x"):
            call()


@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_what_is_no_file_is_not_opened(
    join: Create, disk_path: Path, kind: str, rank: int | None
) -> None:
    """A directory, a link or a pipe under a name of ours is an error of kvio, at once."""
    name = disk_path / ("x" if rank is None else ".x.kvio-map")
    _plant(name, kind)
    with never_waiting(name), pytest.raises(kvio.KvioError, match="x"):
        join("x", rank)


@contextmanager
def never_waiting(path: Path) -> Iterator[None]:
    """Fail where an open of a pipe waits for a writer, which then comes after ten seconds."""
    came: list[int] = []
    late = threading.Timer(10, lambda: came.append(os.open(path, os.O_RDWR | os.O_NONBLOCK)))
    if path.is_fifo():
        late.start()
    try:
        yield
    finally:
        late.cancel()
        if path.is_fifo():
            late.join()
        for fd in came:
            os.close(fd)

    assert came == []


def _plant(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        (path.parent / "victim").write_text("precious")
        path.symlink_to("victim")


def test_a_directory_is_not_replaced(create: Create, disk_path: Path) -> None:
    """`if_exists="replace"` refuses a directory before anything is written."""
    (disk_path / "x").mkdir()
    with pytest.raises(kvio.KvioError, match="x"):
        create("x", SIZE, if_exists="replace")

    assert raw.names(disk_path) == ["x"]


def test_a_link_is_neither_followed_nor_replaced(create: Create, disk_path: Path) -> None:
    """`if_exists="replace"` refuses a link before anything is written; its target stays."""
    _plant(disk_path / "x", "link")
    with pytest.raises(kvio.ConfigError, match="not a regular file"):
        create("x", SIZE, if_exists="replace")

    assert (disk_path / "victim").read_text() == "precious"
    assert raw.names(disk_path) == ["victim", "x"]


def test_a_link_that_came_while_writing_is_replaced_not_followed(
    create: Create, disk_path: Path
) -> None:
    """A link planted under the final name is never written through."""
    file = create("x", SIZE, if_exists="replace")
    file.pwrite(DATA, 0)
    _plant(disk_path / "x", "link")
    file.seal()

    assert (disk_path / "victim").read_text() == "precious"
    assert not (disk_path / "x").is_symlink()
    assert raw.sealed(disk_path / "x").payload == DATA


@pytest.mark.parametrize("name", [".x.kvio-map", ".x.kvio-data", ".x.kvio-map.0123456789abcdef"])
@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_planted_names_are_never_followed(
    create: Create, disk_path: Path, name: str, kind: str
) -> None:
    """What stands under a temporary name is not written through; without it all is as ever."""
    _plant(disk_path / name, kind)
    try:
        with never_waiting(disk_path / name), create("x", SIZE) as file:
            file.pwrite(DATA, 0)
            file.seal()
    except kvio.KvioError:
        assert not (disk_path / "x").exists()
    else:
        assert raw.sealed(disk_path / "x").payload == DATA
        (disk_path / "x").unlink()
    if kind == "link":
        assert (disk_path / "victim").read_text() == "precious"
        (disk_path / "victim").unlink()

    assert set(raw.names(disk_path)) <= {name}


def test_a_link_at_the_map_is_a_name_that_is_taken(create: Create, disk_path: Path) -> None:
    """A map's name that stands, whatever it is, is a BlockExistsError."""
    _plant(disk_path / ".x.kvio-map", "link")
    with pytest.raises(kvio.BlockExistsError):
        create("x", SIZE)


def test_a_link_at_the_data_is_refused_by_ranks(create: Create, disk_path: Path) -> None:
    """A data file that was swapped for a link or for another file is not written to."""
    create("x", SIZE, writers=2)
    data = disk_path / ".x.kvio-data"
    data.rename(disk_path / "moved")
    _plant(data, "link")
    with pytest.raises(kvio.KvioError):
        SharedFile.open(disk_path / "x", 1)
    data.unlink()
    data.write_bytes((disk_path / "moved").read_bytes())
    with pytest.raises(kvio.CorruptBlockError, match="not the file its map was made for"):
        SharedFile.open(disk_path / "x", 1)

    assert (disk_path / "victim").read_text() == "precious"


def test_files_with_like_names_are_left_alone(create: Create, disk_path: Path) -> None:
    """A creation sweeps its own leftovers, not the files of a name that begins like its maps."""
    create("x.kvio-map.y", SIZE).close()
    before = raw.names(disk_path)
    create("x", SIZE).abort()

    assert raw.names(disk_path) == before


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_is_no_data_file_is_not_recovered(create: Create, disk_path: Path, kind: str) -> None:
    """Whatever stands in the place of the data, `recover` is done at once and touches nothing."""
    create("x", SIZE).close()
    (disk_path / ".x.kvio-data").unlink()
    _plant(disk_path / ".x.kvio-data", kind)
    before = raw.permissions(disk_path / ".x.kvio-data")
    with never_waiting(disk_path / ".x.kvio-data"), pytest.raises(kvio.KvioError):
        SharedFile.recover(disk_path / "x")

    assert raw.permissions(disk_path / ".x.kvio-data") == before


def test_another_file_in_the_place_of_the_data_keeps_its_permissions(
    create: Create, disk_path: Path
) -> None:
    """A hard link to a foreign file is neither written nor made accessible or less so."""
    create("x", SIZE).close()
    (disk_path / ".x.kvio-data").unlink()
    (disk_path / "victim").write_text("precious")
    (disk_path / "victim").chmod(0o644)
    (disk_path / ".x.kvio-data").hardlink_to(disk_path / "victim")
    with pytest.raises(kvio.CorruptBlockError, match="not the file its map was made for"):
        SharedFile.recover(disk_path / "x")

    assert raw.permissions(disk_path / "victim") == 0o644
    assert (disk_path / "victim").read_text() == "precious"
