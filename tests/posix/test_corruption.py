"""Damaged, foreign and misplaced files are never returned as blocks."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

import kvio
from kvio.backends.posix.streams import RawFile
from tests.posix import faultlab
from tests.posix.faultlab import TRAILER_BYTES

KEY = "models/a"
PAYLOAD = faultlab.pattern(11, 9001)
BACKENDS = ("posix-tmpfile", "posix-direct", "hybrid")
VERIFY: tuple[Literal["full", "length", "off"], ...] = ("full", "length", "off")
NOT_THERE = (kvio.CorruptBlockError, kvio.BlockNotFoundError)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name each POSIX backend that works on the temporary directory."""
    name = str(request.param)
    try:
        kvio.open_store(name, root=tmp_path, options={"shared_root": True}).close()
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    return name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def plant(root: Path, content: bytes, key: str = KEY) -> Path:
    """Put a file where a key's block lies."""
    path = faultlab.file_of(root, key)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(content)
    return path


def stored(root: Path, backend: str, payload: bytes = PAYLOAD) -> bytes:
    """Let kvio write a block; the bytes of its file."""
    with kvio.open_store(backend, root=root) as store:
        store.write_block(KEY, payload, if_exists="replace")
    return faultlab.file_of(root, KEY).read_bytes()


def refuses(store: kvio.Store, key: str = KEY, *, ranges: bool = True) -> None:
    """Every way to read the block refuses it, and a batch says so and goes on."""
    room = bytearray(len(PAYLOAD) + 9)
    with pytest.raises(NOT_THERE):
        store.read_block_into(key, room)
    with pytest.raises(NOT_THERE):
        store.read_block_into(key, bytearray(len(PAYLOAD)))
    with pytest.raises(NOT_THERE):
        store.read_block(key)
    assert store.verify_block(key).status in ("corrupt", "missing")
    if ranges:
        with pytest.raises(NOT_THERE):
            store.read_block(key, offset=1, nbytes=5)
        with pytest.raises(NOT_THERE):
            store.stat_block(key)
        assert not store.contains(key)
    store.write_block("neighbour", b"intact")
    rooms = [bytearray(6), bytearray(len(PAYLOAD)), bytearray(6)]
    results = store.read_blocks_into(list(zip(("neighbour", key, "neighbour"), rooms, strict=True)))
    assert [r.status for r in results][::2] == ["ok", "ok"]
    assert results[1].status in ("corrupt", "missing")
    assert isinstance(results[1].error, NOT_THERE)
    assert rooms[0] == rooms[2] == b"intact"


def mended_by_keep(store: kvio.Store, root: Path) -> None:
    """``keep`` writes over what is broken instead of keeping it."""
    receipt = store.write_block(KEY, PAYLOAD, if_exists="keep")
    assert not receipt.existed
    assert faultlab.peek(root, KEY) == PAYLOAD
    assert bytes(store.read_block(KEY)) == PAYLOAD


def lengths(whole: int) -> list[int]:
    """Return every interesting length to truncate a file of *whole* bytes to."""
    marks = {0, 1, 63, 64, 65, 4095, 4096, 4097, 8192, len(PAYLOAD), whole // 2}
    near = {whole - back for back in (*range(1, 70), 128, 512, 4096)}
    return sorted(n for n in marks | near if 0 <= n < whole)


def test_a_truncated_block_is_refused_and_fixed(root: Path, backend: str) -> None:
    """Cut at any length, a file is no block; ``keep`` replaces it."""
    whole = stored(root, backend)

    with kvio.open_store(backend, root=root) as store:
        for length in lengths(len(whole)):
            plant(root, whole[:length])
            with pytest.raises(kvio.CorruptBlockError) as caught:
                store.read_block(KEY)
            assert caught.value.key == KEY
            assert store.verify_block(KEY).status == "corrupt", length
        plant(root, whole[:-1])
        refuses(store)
        mended_by_keep(store, root)


def test_an_extended_block_is_refused(root: Path, backend: str) -> None:
    """Bytes after the trailer make a file no block."""
    whole = stored(root, backend)

    with kvio.open_store(backend, root=root) as store:
        for extra in (1, 64, 4096, 100_000):
            plant(root, whole + bytes(extra))
            refuses(store)
        mended_by_keep(store, root)


def test_each_flipped_bit_of_the_trailer_is_found(root: Path, backend: str) -> None:
    """Any single bit flipped in the 64 trailer bytes is found by every read."""
    whole = stored(root, backend)
    at = len(whole) - TRAILER_BYTES
    out = bytearray(len(PAYLOAD))

    with kvio.open_store(backend, root=root) as store:
        for bit in range(8 * TRAILER_BYTES):
            damaged = bytearray(whole)
            damaged[at + bit // 8] ^= 1 << (bit % 8)
            plant(root, bytes(damaged))
            with pytest.raises(kvio.CorruptBlockError):
                store.read_block_into(KEY, out)
            assert not store.contains(KEY), f"bit {bit}"
        mended_by_keep(store, root)


def test_flipped_payload_bits_are_found(root: Path, backend: str) -> None:
    """Flipped payload bits are found by a full read and by verify, wherever they are."""
    whole = stored(root, backend)
    dice = random.Random(3)
    places = [0, 1, 4095, 4096, 8191, 8192, len(PAYLOAD) - 1]
    places += [dice.randrange(len(PAYLOAD)) for _ in range(200)]
    out = bytearray(len(PAYLOAD))

    with kvio.open_store(backend, root=root) as store:
        for place in places:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << dice.randrange(8)
            plant(root, bytes(damaged))
            with pytest.raises(kvio.CorruptBlockError):
                store.read_block_into(KEY, out)
            assert store.verify_block(KEY).status == "corrupt", place
        refuses(store, ranges=False)


def test_a_damaged_large_block_is_found(root: Path, backend: str) -> None:
    """A block read in segments by several threads is checked like any other."""
    payload = faultlab.pattern(5, 700_001)
    options = {"segment_bytes": 131072, "chunk_bytes": 131072}
    whole = stored(root, backend, payload)
    out = faultlab.unaligned(bytes(len(payload)))

    with kvio.open_store(backend, root=root, io_threads=3, options=options) as store:
        assert store.read_block_into(KEY, out) == len(payload)
        assert bytes(out) == payload
        for place in (0, 65535, 65536, 400_000, len(payload) - 1):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            plant(root, bytes(damaged))
            with pytest.raises(kvio.CorruptBlockError):
                store.read_block_into(KEY, out)


ZEROS: tuple[Callable[[bytes], bytes], ...] = (
    lambda whole: bytes(len(whole)),
    lambda whole: bytes(4096) + whole[4096:],
    lambda whole: whole[:-TRAILER_BYTES] + bytes(TRAILER_BYTES),
    lambda whole: whole[:4096] + bytes(4096) + whole[8192:],
    lambda _: b"",
)


@pytest.mark.parametrize("zero", ZEROS, ids=["all", "head", "trailer", "middle", "empty"])
def test_zeros_are_no_block(root: Path, backend: str, zero: Callable[[bytes], bytes]) -> None:
    """What a power cut leaves of unsynced files, zeros in part or whole, is refused."""
    whole = stored(root, backend)
    plant(root, zero(whole))

    with kvio.open_store(backend, root=root) as store:
        refuses(store, ranges=zero(whole)[-TRAILER_BYTES:] != whole[-TRAILER_BYTES:])


def test_foreign_files_are_refused_and_fixed(root: Path, backend: str) -> None:
    """A file that kvio never wrote is no block, whatever is in it."""
    foreign = (
        b"a text file\n" * 100,
        os.urandom(5000),
        b"KVIOBLK\n" * 8,
        faultlab.seal(PAYLOAD, KEY)[:-4] + b"\0\0\0\0",
        faultlab.seal(PAYLOAD, KEY, padding=65536),
    )
    with kvio.open_store(backend, root=root) as store:
        for content in foreign:
            plant(root, content)
            refuses(store)
            mended_by_keep(store, root)


def test_unknown_versions_and_flags_are_refused(root: Path, backend: str) -> None:
    """A later format's block is refused, not guessed at, even with a right checksum."""
    whole = faultlab.seal(PAYLOAD, KEY)
    with kvio.open_store(backend, root=root) as store:
        for at, value in ((8, 2), (8, 0), (10, 2), (10, 0x8001)):
            head = bytearray(whole[-TRAILER_BYTES:-4])
            head[at : at + 2] = struct.pack("<H", value)
            crc = struct.pack("<I", faultlab.crc32c(bytes(head)))
            plant(root, whole[:-TRAILER_BYTES] + bytes(head) + crc)
            refuses(store)


def test_a_block_sealed_without_kvios_code_is_read(root: Path, backend: str) -> None:
    """The format is what the documentation says: a block made from it is taken."""
    with kvio.open_store(backend, root=root) as store:
        for payload, padding in ((PAYLOAD, 0), (PAYLOAD, 65535), (b"", 0), (b"", 4032)):
            plant(root, faultlab.seal(payload, KEY, padding=padding))
            assert bytes(store.read_block(KEY)) == payload
            assert store.stat_block(KEY).checksum == faultlab.crc32c(payload)
            assert store.verify_block(KEY).ok


def not_a_file(path: Path, kind: str) -> None:
    """Put something that is not a file under a block's name."""
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink to a block":
        target = path.with_name("target")
        target.write_bytes(faultlab.seal(PAYLOAD, KEY))
        path.symlink_to(target)
    elif kind == "dangling symlink":
        path.symlink_to("nowhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        # By the directory's descriptor, because a socket's path may have 107 bytes only.
        directory = os.open(path.parent, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)


KINDS = ("directory", "fifo", "socket", "symlink to a block", "dangling symlink", "device")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_what_is_no_file_is_no_block(
    root: Path, backend: str, kind: str, layout: Literal["block", "plain"]
) -> None:
    """A directory, FIFO, socket or link under a block's name is refused at once, never followed."""
    path = faultlab.file_of(root, "k", layout=layout)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    not_a_file(path, kind)
    out = bytearray(len(PAYLOAD))

    with kvio.open_store(backend, root=root, layout=layout) as store:
        with pytest.raises(NOT_THERE):
            store.read_block_into("k", out)
        with pytest.raises(NOT_THERE):
            store.stat_block("k")
        assert not store.contains("k")
        assert store.read_blocks_into([("k", out)])[0].status in ("corrupt", "missing")
        assert out == bytes(len(PAYLOAD))
        if kind == "directory":
            with pytest.raises(kvio.StorageError):
                store.write_block("k", PAYLOAD)
            assert path.is_dir()
        else:
            assert not store.write_block("k", PAYLOAD).existed
            assert path.is_file()
            assert not path.is_symlink()
            assert bytes(store.read_block("k")) == PAYLOAD
    assert not faultlab.temporaries(root)


def test_swapped_blocks_are_refused(root: Path, backend: str) -> None:
    """Two whole blocks under each other's names are refused: the trailer knows its key."""
    with kvio.open_store(backend, root=root) as store:
        store.write_blocks([("a", b"1" * 5000), ("b", b"2" * 5000)])
        one, two = (faultlab.file_of(root, key) for key in ("a", "b"))
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)

        refuses(store, "a")
        refuses(store, "b")


def test_a_block_of_another_namespace_is_refused(root: Path, backend: str) -> None:
    """A file copied from another namespace's store is no block here."""
    plant(root, faultlab.seal(PAYLOAD, KEY, namespace="tenant-1"))

    with kvio.open_store(backend, root=root) as store:
        refuses(store)
        mended_by_keep(store, root)


def test_a_deleted_namespace_does_not_show_through(root: Path) -> None:
    """Stores of two namespaces in one root never see each other's blocks as good."""
    one, two = (
        kvio.open_store("posix-tmpfile", root=root, options={"namespace": name})
        for name in ("one", "two")
    )
    with one, two:
        for i in range(64):
            one.write_block(f"k{i}", b"secret of one")
            assert not two.contains(f"k{i}")
            with pytest.raises(NOT_THERE):
                two.read_block(f"k{i}")


@pytest.mark.parametrize("verify", VERIFY)
def test_verify_checks_what_it_promises(
    root: Path, backend: str, verify: Literal["full", "length", "off"]
) -> None:
    """``full`` finds a flipped payload, ``length`` a foreign key, ``off`` trusts."""
    flipped = bytearray(stored(root, backend))
    flipped[5] ^= 1
    rotten = bytes(flipped[: len(PAYLOAD)])

    with kvio.open_store(backend, root=root, verify=verify) as store:
        plant(root, bytes(flipped))
        if verify == "full":
            with pytest.raises(kvio.CorruptBlockError):
                store.read_block(KEY)
        else:
            assert bytes(store.read_block(KEY)) == rotten
        assert store.verify_block(KEY).status == "corrupt", "verify_block always checks all"
        plant(root, faultlab.seal(PAYLOAD, "another"))
        if verify == "off":
            assert bytes(store.read_block(KEY)) == PAYLOAD
        else:
            with pytest.raises(kvio.CorruptBlockError):
                store.read_block(KEY)
        plant(root, bytes(flipped[:-1]))
        with pytest.raises(kvio.CorruptBlockError):
            store.read_block(KEY)


def test_error_counts_a_broken_block_as_taken(root: Path, backend: str) -> None:
    """``if_exists="error"`` never overwrites, not even what is broken."""
    plant(root, b"broken")

    with kvio.open_store(backend, root=root) as store, pytest.raises(kvio.BlockExistsError):
        store.write_block(KEY, PAYLOAD, if_exists="error")

    assert faultlab.file_of(root, KEY).read_bytes() == b"broken"


def test_a_file_that_cannot_be_read_is_an_error_with_its_key(disk_path: Path) -> None:
    """What the kernel refuses, such as a place before the first byte."""
    (disk_path / "file").write_bytes(b"data")
    dirfd = os.open(disk_path, os.O_RDONLY)
    file = RawFile(dirfd, "file", "a/key")
    out = bytearray(4)
    file.read_into(memoryview(out), 0)
    with pytest.raises(kvio.StorageError, match="read the file") as caught:
        file.read_into(memoryview(bytearray(4)), -5)
    file.close()
    os.close(dirfd)

    assert out == b"data"
    assert caught.value.key == "a/key"
