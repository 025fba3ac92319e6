"""What names a store: a path, a URL, or a backend."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio.url import StoreURL, locate


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of our own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


PATHS = ["./kv", "data/kv", "a b/%41?create=false#x", "~/kv", "a/hybrid:/kv", "s3+x/y", "-/=@:&"]


@pytest.mark.parametrize("path", PATHS)
def test_text_with_a_slash_is_a_path_taken_as_it_is(here: Path, path: str) -> None:
    """Below the working directory, with every character as it is written, by the backend hybrid."""
    with kvio.open_store(path, create=True) as store:
        store.write_block("k", b"data")
        again = pickle.loads(pickle.dumps(store))

    assert (store.url.scheme, store.url.path) == ("hybrid", str(here / path.removeprefix("./")))
    assert next(here.joinpath(path).glob("?/?/k")).read_bytes().startswith(b"data")
    with again:
        assert bytes(again.read_block("k")) == b"data"


@pytest.mark.parametrize("kind", [Path, PurePosixPath])
@pytest.mark.parametrize("name", ["kv", "memory", ".", "hybrid:x"])
def test_a_path_object_is_a_path_whatever_it_says(
    here: Path, kind: type[PurePosixPath], name: str
) -> None:
    """A path without a slash is a path where its type says so; as text it is a backend's name."""
    here.chmod(0o700)
    with kvio.open_store(kind(name), create=True) as store:
        assert store.url == StoreURL("hybrid", "", str(here / name), {"create": "true"})
    with kvio.open_store("memory") as store:
        assert store.url.scheme == "memory"


def test_what_no_store_has_as_its_name_is_refused(here: Path) -> None:
    """Bytes, names of nothing, URLs of files and mistyped ones, each with what to do."""

    class BytesPath:
        def __fspath__(self) -> bytes:
            return b"/kv"

    for wrong in (b"/kv", BytesPath(), 3, None):
        with pytest.raises(TypeError):
            kvio.open_store(wrong)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(TypeError):
            kvio.open_store("hybrid", root=wrong or b"")  # type: ignore[arg-type]  # on purpose
    for nothing in (".", "", "~"):
        with pytest.raises(kvio.ConfigError, match="with a slash"):
            kvio.open_store(nothing)
    with pytest.raises(kvio.UnknownBackendError, match="hybrid:///mnt/a b, or the path alone"):
        kvio.open_store("file:///mnt/a%20b")
    with pytest.raises(kvio.ConfigError, match="two slashes"):
        kvio.open_store("hybrid:/kv", create=True)
    with pytest.raises(kvio.ConfigError, match="twice"):
        kvio.open_store("./kv", root=here)
    with pytest.raises(kvio.ConfigError):
        kvio.open_store("./k\0v", create=True)
    assert os.listdir(here) == []


def test_a_directory_that_is_named_like_a_backend_gets_its_path_said(here: Path) -> None:
    """A bare name is a backend's; the error has what to write for the directory."""
    (here / "kv").mkdir()
    with pytest.raises(kvio.UnknownBackendError, match=r"the directory of that name is '\./kv'"):
        kvio.open_store("kv")


@pytest.mark.parametrize("url", ["s3:/b?secret_key=hush/hush", "s3?secret_key=hush/hush"])
def test_a_mistyped_url_with_a_secret_is_refused_without_it(url: str) -> None:
    """It is not taken as a path, whose error would show it."""
    with pytest.raises(kvio.ConfigError) as caught:
        kvio.open_store(url)

    assert "hush" not in str(caught.value)


def test_a_working_directory_that_is_gone_is_a_config_error(here: Path) -> None:
    """A relative path from nowhere is refused, an absolute one is opened."""
    gone = here / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()

    for name, root in (("./kv", None), ("hybrid", "kv")):
        with pytest.raises(kvio.ConfigError, match="gone"):
            kvio.open_store(name, root=root)
    kvio.open_store(here / "kv", create=True).close()


@given(st.text(max_size=30))
def test_any_text_names_a_store_or_is_refused(text: str) -> None:
    """No text makes it fail in another way, and a path is what it was."""
    try:
        found = locate(text)
    except (kvio.ConfigError, kvio.UnknownBackendError):
        return

    if "://" not in text and "/" in text:
        assert found == StoreURL("hybrid", "", os.path.abspath(text))


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
        kvio.open_store(path / "d")


def test_create_makes_nothing_beyond_a_link_to_nowhere(tmp_path: Path) -> None:
    """A link above the root that leads nowhere is an error, and what it names is not made."""
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()

    for name in ("link", "file"):
        with pytest.raises(kvio.KvioError, match=f"{name}/a"):
            kvio.open_store(tmp_path / name / "a" / "b", create=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
