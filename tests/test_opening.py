"""What names a store, and what opening it makes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio


@pytest.fixture
def hostile_umask() -> Iterator[None]:
    before = os.umask(0o777)
    yield
    os.umask(before)


@pytest.mark.usefixtures("hostile_umask")
@pytest.mark.parametrize("how", ["url", "keyword"])
def test_create_makes_what_is_missing_above_for_its_owner_alone(tmp_path: Path, how: str) -> None:
    """Every directory that is made has mode 0700 whatever the umask; what stands stays."""
    os.chmod(tmp_path, 0o755)
    path = tmp_path / "a" / "b" / "c"
    if how == "url":
        store = kvio.open_store(f"posix-tmpfile://{path}/?create=true")
    else:
        store = kvio.open_store("posix-tmpfile", root=path, create=True)
    store.close()

    made = [path, *path.parents[:2]]
    assert [oct(directory.stat().st_mode) for directory in made] == ["0o40700"] * 3
    assert oct(tmp_path.stat().st_mode) == "0o40755"
    with pytest.raises(kvio.ConfigError, match="create=true"):
        kvio.open_store("hybrid", root=path / "d")


def test_create_makes_nothing_beyond_a_link_to_nowhere(tmp_path: Path) -> None:
    """A link above the root that leads nowhere is an error, and what it names is not made."""
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()

    for name in ("link", "file"):
        with pytest.raises(kvio.KvioError, match=f"{name}/a"):
            kvio.open_store("hybrid", root=tmp_path / name / "a" / "b", create=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
