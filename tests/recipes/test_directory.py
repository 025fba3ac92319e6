"""``kvio.connectors.directory``: a directory is in the store whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio.connectors.directory import (
    load_directory,
    remove_directory,
    save_directory,
    saved_directories,
)


@pytest.fixture
def store() -> Iterator[kvio.Store]:
    """Yield a store in memory."""
    with kvio.open_store("memory") as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a directory with files of odd names, lengths and places."""
    root = tmp_path / "source"
    contents = {"a": b"", "weights.bin": os.urandom(100_003), "deep/er/ü b%.json": b"{}"}
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def content(root: Path) -> dict[str, bytes]:
    """Map the files of a directory to their bytes."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def save(store: Any, name: str, source: Path) -> None:
    """Save where nothing is durable."""
    save_directory(store, name, source, level="visible")


class Failing:
    """A store whose writes fail after some have been made."""

    def __init__(self, store: kvio.Store, after: int) -> None:
        self._store = store
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write_block(self, key: str, data: Any, **options: Any) -> Any:
        if not self._left:
            raise kvio.StorageFullError("no room", key=key)
        self._left -= 1
        return self._store.write_block(key, data, **options)


def test_what_was_saved_comes_back(store: kvio.Store, source: Path, tmp_path: Path) -> None:
    """Names, lengths and bytes are equal; nobody else may read them."""
    save(store, "run/1", source)
    target = tmp_path / "not" / "there"

    load_directory(store, "run/1", target)

    assert content(target) == content(source)
    assert {path.stat().st_mode & 0o777 for path in target.rglob("*")} == {0o700, 0o600}
    assert [path.name for path in target.parent.iterdir()] == ["there"]


@pytest.mark.parametrize("after", range(4))
def test_a_save_that_fails_leaves_the_earlier_one(
    after: int, store: kvio.Store, source: Path, tmp_path: Path
) -> None:
    """Whichever block cannot be written, the earlier directory is whole; a later save tidies up."""
    save(store, "run", source)
    before = content(source)
    (source / "weights.bin").write_bytes(b"new")

    with pytest.raises(kvio.StorageFullError):
        save(Failing(store, after), "run", source)

    load_directory(store, "run", tmp_path / "found")
    assert content(tmp_path / "found") == before
    save(store, "run", source)
    load_directory(store, "run", tmp_path / "new")
    assert content(tmp_path / "new") == content(source)
    assert len(list(store.list_keys())) == 4


def test_a_first_save_that_fails_is_none(store: kvio.Store, source: Path, tmp_path: Path) -> None:
    """Files without a list are not a directory."""
    with pytest.raises(kvio.StorageFullError):
        save(Failing(store, 3), "run", source)

    assert saved_directories(store) == []
    with pytest.raises(kvio.BlockNotFoundError, match="no directory 'run'"):
        load_directory(store, "run", tmp_path / "found")
    assert not (tmp_path / "found").exists()


def test_names_are_listed_and_removed_one_at_a_time(store: kvio.Store, source: Path) -> None:
    """A name may begin as another does; the other is left alone."""
    for name in ("run/2", "run", "run/10", "other"):
        save(store, name, source)

    assert saved_directories(store, "run/") == ["run/10", "run/2"]
    assert remove_directory(store, "run")
    assert not remove_directory(store, "run")
    assert saved_directories(store) == ["other", "run/10", "run/2"]
    assert len(list(store.list_keys())) == 12


def test_a_load_that_fails_leaves_nothing(store: kvio.Store, source: Path, tmp_path: Path) -> None:
    """A missing file or one of another length; the directory does not appear."""
    save(store, "run", source)
    key = next(key for key in store.list_keys() if key.endswith("/000002"))
    before = set(tmp_path.iterdir())

    store.write_block(key, b"other", if_exists="replace")
    with pytest.raises(kvio.CorruptBlockError, match=r"'weights\.bin' of 'run'"):
        load_directory(store, "run", tmp_path / "found")
    store.delete_block(key)
    with pytest.raises(kvio.BlockNotFoundError):
        load_directory(store, "run", tmp_path / "found")

    assert set(tmp_path.iterdir()) == before


def test_a_directory_with_files_is_not_replaced(
    store: kvio.Store, source: Path, tmp_path: Path
) -> None:
    """An empty one is taken."""
    save(store, "run", source)
    target = tmp_path / "target"
    target.mkdir()
    load_directory(store, "run", target)
    (target / "a").write_bytes(b"mine")

    with pytest.raises(OSError, match="not empty"):
        load_directory(store, "run", target)
    assert (target / "a").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "path", ["../out", "/out", "a/../../out", "a//out", "", ".", "..", "a/.", "nul\0", 3, None]
)
def test_a_list_cannot_name_a_file_elsewhere(path: Any, store: kvio.Store, tmp_path: Path) -> None:
    """A user who can write to the store does not choose what is written here."""
    key = f"run/{'0' * 16}/000000"
    store.write_block(key, b"bytes")
    listed = {"format": 1, "files": [[path, key, 5]]}
    store.write_block("run/directory.json", json.dumps(listed).encode())

    with pytest.raises(kvio.CorruptBlockError, match="is no file of 'run'"):
        load_directory(store, "run", tmp_path / "in" / "found")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"format": 2}', b'{"format": 1}'),
        *(b'{"format": 1, "files": 3}', b'{"format": 1, "files": [3]}'),
        *(b'{"format": 1, "files": [["a", "b"]]}', b'{"format": 1, "files": [["a", "b", 1]]}'),
        b'{"format": 1, "files": [["a", "other/0000000000000000/000000", 1]]}',
    ],
)
def test_a_list_that_is_none_is_an_error(data: bytes, store: kvio.Store, tmp_path: Path) -> None:
    """It names the block."""
    store.write_block("run/directory.json", data)

    with pytest.raises((kvio.CorruptBlockError, kvio.UnsupportedError), match="run"):
        load_directory(store, "run", tmp_path / "found")


def test_what_is_no_file_is_refused(store: kvio.Store, source: Path) -> None:
    """A link could lead anywhere; nothing is stored."""
    (source / "link").symlink_to("/etc/passwd")

    with pytest.raises(kvio.UnsupportedError, match="link"):
        save(store, "run", source)
    assert saved_directories(store) == []


def test_a_level_that_the_store_lacks_is_refused(store: kvio.Store, source: Path) -> None:
    """The default is durable."""
    with pytest.raises(kvio.UnsupportedError, match="durability='durable'"):
        save_directory(store, "run", source)
    with pytest.raises(kvio.ConfigError, match="level"):
        save_directory(store, "run", source, level="accepted")
    assert saved_directories(store) == []


def test_a_tier_has_passed_everything_on(store: kvio.Store, source: Path) -> None:
    """A save through a staging tier returns when the store has all of it."""
    with kvio.stage(store, "16MiB") as tier:
        save(tier, "run", source)
        assert saved_directories(store) == ["run"]
