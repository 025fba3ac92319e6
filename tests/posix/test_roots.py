"""The root directory: what is accepted, with which modes, and that nothing leaves it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvio
from kvio.url import OptionValue
from tests.posix import children, faultlab

NOBODY = 65534
BACKENDS = ("posix-tmpfile", "posix-direct")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def test_a_missing_root_is_a_config_error(root: Path) -> None:
    """A root that is not there is refused, and not made."""
    with pytest.raises(kvio.ConfigError, match="create=true"):
        kvio.open_store("posix-tmpfile", root=root / "missing")

    assert not (root / "missing").exists()


def test_a_file_is_no_root(root: Path) -> None:
    """A file, FIFO or device is refused."""
    (root / "file").write_bytes(b"")
    os.mkfifo(root / "fifo")

    for path in (root / "file", root / "fifo", Path("/dev/null")):
        with pytest.raises(kvio.ConfigError, match="not a directory"):
            kvio.open_store("posix-tmpfile", root=path, options={"create": True})


def test_a_link_to_itself_is_no_root(root: Path) -> None:
    """What the system says of the path is the error."""
    (root / "loop").symlink_to("loop")
    with pytest.raises(kvio.StorageError, match="open root") as caught:
        kvio.open_store("posix-tmpfile", root=root / "loop")

    assert caught.value.errno == errno.ELOOP


def test_a_link_to_a_root_is_its_target(root: Path, tmp_path: Path) -> None:
    """A symbolic link to a directory that passes the checks is as good as the directory."""
    link = tmp_path / "link"
    link.symlink_to(root)

    with kvio.open_store("posix-tmpfile", root=link) as store:
        store.write_block("k", b"data")

    assert faultlab.peek(root, "k") == b"data"


def test_a_dangling_link_is_a_missing_root(root: Path) -> None:
    """A link to nowhere is refused, also with create."""
    (root / "link").symlink_to("nowhere")

    for create in (False, True):
        with pytest.raises(kvio.ConfigError):
            kvio.open_store("posix-tmpfile", root=root / "link", options={"create": create})
    assert not (root / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720, 0o702, 0o1777])
def test_a_root_that_others_may_write_is_refused(root: Path, mode: int) -> None:
    """Group- or world-writable roots need ``shared_root``."""
    root.chmod(mode)

    with pytest.raises(kvio.ConfigError, match="shared_root"):
        kvio.open_store("posix-tmpfile", root=root)
    with kvio.open_store("posix-tmpfile", root=root, options={"shared_root": True}) as store:
        assert store.write_block("k", b"data").nbytes == 4
    assert stat.S_IMODE(root.stat().st_mode) == mode, "a root that stands is left as it is"


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750, 0o711])
def test_a_root_that_others_may_only_read_is_taken(root: Path, mode: int) -> None:
    """Reading and passing through by others is their owner's choice."""
    root.chmod(mode)

    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("k", b"data")
    assert faultlab.file_of(root, "k").stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_a_root_of_another_user_is_refused(root: Path) -> None:
    """A root that is not ours needs ``shared_root``."""
    children.need_root()
    os.chown(root, NOBODY, NOBODY)

    with pytest.raises(kvio.ConfigError, match="shared_root"):
        kvio.open_store("posix-tmpfile", root=root)
    kvio.open_store("posix-tmpfile", root=root, options={"shared_root": True}).close()


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o500, 0o400, 0o300, 0o000])
def test_a_root_without_our_permissions_is_denied(public: Path, mode: int) -> None:
    """Unless it may be opened to be read, a user must be able to read, write and pass."""
    children.need_root()
    root = public / "root"
    root.mkdir()
    os.chown(root, NOBODY, NOBODY)
    root.chmod(mode)

    def work() -> None:
        children.become(NOBODY)
        with pytest.raises(kvio.AccessDeniedError) as caught:
            kvio.open_store("posix-tmpfile", root=root, options={"read_only": False})
        assert caught.value.errno == errno.EACCES

    children.in_child(work)
    assert not list(root.iterdir())


@pytest.mark.root
def test_a_fan_out_directory_of_another_user_is_denied(public: Path) -> None:
    """A directory below the root that this user may not enter is a typed error, and no miss."""
    children.need_root()
    root = public / "root"
    root.mkdir(mode=0o700)
    os.chown(root, NOBODY, NOBODY)
    first = faultlab.file_of(root, "k").parent.parent
    first.mkdir(mode=0o700)

    def work() -> None:
        children.become(NOBODY)
        with kvio.open_store("posix-tmpfile", root=root) as store:
            with pytest.raises(kvio.AccessDeniedError):
                store.write_block("k", b"data")
            with pytest.raises(kvio.AccessDeniedError):
                store.read_block("k")

    children.in_child(work)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o277, 0o777])
@pytest.mark.parametrize("publish", ["auto", "rename"])
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_modes_do_not_depend_on_the_umask(
    tmp_path: Path, mask: int, publish: str, layout: Literal["block", "plain"]
) -> None:
    """Files are 0600 and directories 0700, the made root included, whatever the umask."""
    root = tmp_path / "made"
    options: dict[str, OptionValue] = {"create": True, "publish": publish}

    with (
        faultlab.umask(mask),
        kvio.open_store("posix-tmpfile", root=root, layout=layout, options=options) as store,
    ):
        store.write_blocks([(f"a{i}/b/c", b"data") for i in range(40)])
        store.write_block("a0/b/c", b"new data", if_exists="replace")

    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in root.rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.root
@pytest.mark.parametrize("mask", [0o000, 0o277, 0o777])
def test_modes_do_not_depend_on_the_umask_of_a_user(public: Path, mask: int) -> None:
    """The same for a user whom permission bits bind."""
    children.need_root()
    public.chmod(0o777)
    root = public / "made"

    def work() -> None:
        children.become(NOBODY)
        os.umask(mask)
        with kvio.open_store("posix-tmpfile", root=root, options={"create": True}) as store:
            results = store.write_blocks([(f"k{i}", b"data") for i in range(40)])
            assert all(result.ok for result in results), results
            assert bytes(store.read_block("k7")) == b"data"

    children.in_child(work)
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in root.rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_create_takes_a_root_that_stands(root: Path) -> None:
    """``create`` makes what is missing, and takes what stands."""
    for _ in range(2):
        kvio.open_store("posix-tmpfile", root=root / "a" / "b", options={"create": True}).close()

    assert (root / "a" / "b").is_dir()


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nbytes", [0, 1, 63, 4000, 4031, 4032, 4033, 4096, 70_001, 400_003])
def test_padding_holds_nothing_of_the_heap(
    root: Path, backend: str, layout: Literal["block", "plain"], nbytes: int
) -> None:
    """Between payload and trailer there are zeros, whatever the bounce buffers held before."""
    payload = b"\xee" * nbytes
    options: dict[str, OptionValue] = {"segment_bytes": 131072, "chunk_bytes": 131072}
    try:
        store = kvio.open_store(backend, root=root, layout=layout, options=options)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    with store:
        for memory in (faultlab.aligned(payload), faultlab.unaligned(payload)):
            poison(store)
            store.write_block("k", memory, if_exists="replace")
            content = faultlab.file_of(root, "k", layout=layout).read_bytes()
            assert b"\xaa" not in content
            assert faultlab.peek(root, "k", layout=layout) == payload
            if layout == "plain":
                assert content == payload


def poison(store: kvio.Store) -> None:
    """Fill every bounce buffer with what must not reach the file system."""
    pool = faultlab.engine_of(store).bounce
    buffers = [pool.take() for _ in range(8)]
    for buffer in buffers:
        buffer.view()[:] = b"\xaa" * buffer.nbytes
        pool.give(buffer)


HOSTILE = (
    "", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "a/../b", "a/..", "a//b", "a/", "/a",
    ".hidden", "a/.b", "a\0b", "a\nb", "a~b", "a\\b", "a b", "é", "\uff41", "-a", "~", "a" * 201,
    ".kvio-tmp-0-1-0", ".kvio-calibration.json", "%2e%2e/x", "a:b", "a*b", "{}", "\ud800",
)  # fmt: skip


@pytest.mark.parametrize("layout", ["block", "plain"])
def test_hostile_keys_touch_nothing(tmp_path: Path, layout: Literal["block", "plain"]) -> None:
    """Every operation refuses them before any I/O."""
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    (tmp_path / "x").write_bytes(b"outside")

    with kvio.open_store("posix-tmpfile", root=root, layout=layout) as store:
        before = sorted(tmp_path.rglob("*"))
        for key in HOSTILE:
            for call in (
                lambda: store.write_block(key, b"data"),  # noqa: B023  # called at once
                lambda: store.read_block(key),  # noqa: B023
                lambda: store.stat_block(key),  # noqa: B023
                lambda: store.delete_block(key),  # noqa: B023
                lambda: store.write_blocks([("fine", b""), (key, b"data")]),  # noqa: B023
                lambda: store.read_blocks_into([(key, bytearray(9))]),  # noqa: B023
                lambda: store.delete_blocks([key]),  # noqa: B023
                lambda: store.count_leading([key]),  # noqa: B023
            ):
                with pytest.raises(kvio.InvalidKeyError):
                    call()
        assert sorted(tmp_path.rglob("*")) == before


@given(st.text(st.sampled_from("ab._-=@+~/\\ \0é%:A0"), min_size=1, max_size=12))
@example("a/b")
@example("a..b/c")
def test_a_key_is_refused_or_stays_inside(key: str) -> None:
    """Whatever the text: an InvalidKeyError, or one file below the root and nothing else."""
    for layout in ("block", "plain"):
        work = Path(tempfile.mkdtemp(prefix="kvio-keys-"))
        root = work / "root"
        root.mkdir(mode=0o700)
        try:
            with kvio.open_store("posix-tmpfile", root=root, layout=layout) as store:
                try:
                    store.write_block(key, b"data")
                except kvio.InvalidKeyError:
                    wanted = []
                else:
                    wanted = [faultlab.file_of(root, key, layout=layout)]
                    assert list(store.list_keys()) == [key]
            assert [path for path in work.rglob("*") if path.is_file()] == wanted
        finally:
            shutil.rmtree(work)


def test_the_longest_key_fits(root: Path) -> None:
    """A key of 200 characters is stored, in one segment or in a hundred, in both layouts."""
    keys = ("k" * 200, "/".join("k" * 100) + "k")
    for layout in ("block", "plain"):
        own = root / layout
        own.mkdir(mode=0o700)
        with kvio.open_store("posix-tmpfile", root=own, layout=layout) as store:
            for key in keys:
                store.write_block(key, b"data")
            assert sorted(store.list_keys()) == sorted(keys)


@pytest.mark.parametrize("layout", ["block", "plain"])
def test_a_link_below_the_root_is_not_followed(
    tmp_path: Path, layout: Literal["block", "plain"]
) -> None:
    """A symbolic link where a directory of the store should be leads nowhere."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir(mode=0o700)
    outside.mkdir()
    path = faultlab.file_of(root, "a/b", layout=layout)
    inside = outside / path.relative_to(root).parent.relative_to(path.relative_to(root).parts[0])
    inside.mkdir(parents=True, exist_ok=True)
    (inside / path.name).write_bytes(faultlab.seal(b"not yours", "a/b"))
    (root / path.relative_to(root).parts[0]).symlink_to(outside)
    before = sorted(outside.rglob("*"))

    with kvio.open_store("posix-tmpfile", root=root, layout=layout) as store:
        with pytest.raises(kvio.KvioError):
            store.write_block("a/b", b"data", if_exists="replace")
        with pytest.raises(kvio.KvioError):
            store.read_block("a/b")
        try:
            gone = store.delete_block("a/b")
        except kvio.StorageError:
            gone = False
        assert not gone
        assert "a/b" not in set(store.list_keys())
        assert store.sweep() == []

    assert sorted(outside.rglob("*")) == before
    assert (inside / path.name).read_bytes() == faultlab.seal(b"not yours", "a/b")


def test_plain_keys_that_need_one_name_twice_fail_typed(root: Path) -> None:
    """In ``layout=plain`` a key cannot also be another's directory; the first one stays whole."""
    with kvio.open_store("posix-tmpfile", root=root, layout="plain") as store:
        store.write_block("a", b"a file")
        with pytest.raises(kvio.StorageError) as caught:
            store.write_block("a/b", b"below it")
        assert caught.value.errno == errno.ENOTDIR
        assert caught.value.key == "a/b"
        assert not store.contains("a/b")
        assert not store.delete_block("a/b")
        with pytest.raises(kvio.BlockNotFoundError):
            store.read_block("a/b")
        store.write_block("c/d", b"below")
        for if_exists in ("keep", "replace", "error"):
            with pytest.raises((kvio.StorageError, kvio.BlockExistsError)):
                store.write_block("c", b"a file", if_exists=if_exists)
        assert not store.contains("c")
        with pytest.raises(kvio.KvioError):
            store.delete_block("c")
        results = store.write_blocks([("e", b"1"), ("a/b", b"2"), ("c", b"3"), ("f", b"4")])

        assert [result.ok for result in results] == [True, False, False, True]
        assert bytes(store.read_block("a")) == b"a file"
        assert bytes(store.read_block("c/d")) == b"below"
        assert sorted(store.list_keys()) == ["a", "c/d", "e", "f"]
    assert not faultlab.temporaries(root)


def test_an_empty_root_that_nobody_may_enter_is_ours_again(disk_path: Path) -> None:
    """As one whose maker died under a umask that takes the owner's bits, before it set the mode."""
    root = disk_path / "root"
    root.mkdir()
    root.chmod(0)
    with kvio.open_store("posix-tmpfile", root=root, options={"create": True}) as store:
        store.write_block("k", b"data")

    assert root.stat().st_mode & 0o7777 == 0o700
