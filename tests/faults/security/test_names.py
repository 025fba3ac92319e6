"""No name leads out: keys, namespaces, listings, DLIO's names, shared files, URLs, commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import pytest

import kvio
from kvio.cli.app import run
from kvio.connectors.dlio.settings import key_of
from kvio.types import is_key
from tests.faults.security import corpus
from tests.faults.sizes import size
from tests.faults.totals import Tally
from tests.posix import faultlab
from tests.s3.failing import BUCKET, PREFIX, open_faulty
from tests.s3.faulty import FaultyServer

WORDS: Final = list(corpus.words())
_VERBS: Final[tuple[Callable[[kvio.Store, str], object], ...]] = (
    lambda s, k: s.write_block(k, b"data"),
    lambda s, k: s.write_block(k, b"data", if_exists="replace"),
    lambda s, k: s.write_blocks([("fine", b""), (k, b"data")]),
    lambda s, k: s.submit_write(k, b"data").result(30),
    lambda s, k: s.read_block(k),
    lambda s, k: s.read_block(k, offset=1, nbytes=1),
    lambda s, k: s.read_block_into(k, bytearray(9)),
    lambda s, k: s.read_blocks_into([(k, bytearray(9))]),
    lambda s, k: s.stat_block(k),
    lambda s, k: s.contains(k),
    lambda s, k: s.count_leading([k]),
    lambda s, k: s.verify_block(k),
    lambda s, k: list(s.list_keys(k)),
    lambda s, k: s.delete_block(k),
    lambda s, k: s.delete_blocks([k]),
)
_LIST: Final = _VERBS[12]


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[Path]:
    """Yield a root, and check that nothing beside it was touched."""
    corpus.make_outside(tmp_path)
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    others = [tmp_path / name for name in corpus.entries(tmp_path, without="root")]
    before = corpus.look_at(*others)
    yield root
    assert {tmp_path / n for n in corpus.entries(tmp_path, without="root")} == set(others)
    assert corpus.look_at(*others) == before


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct", "hybrid"])
def test_a_key_leads_nowhere_else(
    backend: str, layout: Literal["block", "plain"], untouched: Path, tally: Tally
) -> None:
    """Each verb with each name: InvalidKeyError before any I/O, or one file below the root."""
    try:
        store = kvio.open_store(backend, root=untouched, layout=layout)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"{backend} on the temporary directory's file system: {exc}")
    with store:
        for word in WORDS[:: 1 if backend == "posix-tmpfile" else size(10, 1)]:
            for verb in _VERBS:
                tally.add(names=1)
                if is_key(word):
                    try:
                        verb(store, word)
                    except kvio.KvioError:
                        continue
                    continue
                if verb is _LIST:  # a prefix need not be a key
                    assert verb(store, word) in ([], ["fine"]), repr(word)
                    continue
                with pytest.raises(kvio.InvalidKeyError):
                    verb(store, word)
        for word in filter(is_key, WORDS):
            try:
                store.write_block(word, b"data")
            except kvio.StorageError:
                assert layout == "plain"  # the directory of another key has this name
                continue
            assert faultlab.file_of(untouched, word, layout=layout).is_file()
            store.delete_block(word)


def test_a_key_leads_to_no_other_object(tally: Tally) -> None:
    """Each verb with each name: InvalidKeyError before any request, or requests for that key."""
    with FaultyServer() as server, open_faulty("s3+minio", server) as store:
        for word in WORDS[:: size(5, 1)]:
            for verb in _VERBS:
                before = len(server.requests)
                tally.add(names=1)
                if is_key(word) or verb is _LIST:  # a prefix need not be a key
                    with suppress(kvio.KvioError):
                        verb(store, word)
                else:
                    with pytest.raises(kvio.InvalidKeyError):
                        verb(store, word)
                seen = {one.key for one in server.requests[before:]} - {""}
                good = {f"{PREFIX}/{word}", f"{PREFIX}/fine"} if is_key(word) else set()
                assert seen <= good, repr(word)
        assert len(server.requests) > 20


def test_a_namespace_leads_nowhere_else(untouched: Path, tally: Tally) -> None:
    """Whatever a namespace is called: it is refused, or its blocks lie below the root."""
    for word in WORDS:
        tally.add(names=1)
        try:
            store = kvio.open_store("posix-tmpfile", root=untouched, options={"namespace": word})
        except kvio.ConfigError:
            continue
        with store:
            store.write_block("k", b"data", if_exists="replace")
            assert faultlab.peek(untouched, "k", namespace=word) == b"data"


def test_names_on_the_file_system_are_keys_or_nothing(untouched: Path, tally: Tally) -> None:
    """Files that a stranger put there with names that lead elsewhere are in no listing."""
    with kvio.open_store("posix-tmpfile", root=untouched) as store:
        store.write_block("good", b"data")
        leaf = faultlab.file_of(untouched, "good").parent
        for word in WORDS:
            name = word.replace("/", "~")
            if "\0" in name or name in ("", ".", "..") or name.startswith(".kvio-tmp-"):
                continue  # the last is a leftover of another machine, to be swept
            try:
                (leaf / name).write_bytes(b"stranger")
            except (OSError, UnicodeEncodeError):
                continue  # no name that this file system takes
            tally.add(names=1)
        assert all(map(is_key, store.list_keys()))
        assert store.sweep(older_than_s=0.0) == []


def test_names_on_a_server_are_keys_or_nothing(tmp_path: Path, tally: Tally) -> None:
    """Objects of a hostile server are listed only if their names are keys: no path leads out."""
    with FaultyServer() as server, open_faulty("s3+minio", server) as store:
        for word in WORDS:
            if "\0" in word or any(0xD800 <= ord(c) < 0xE000 or ord(c) < 32 for c in word):
                continue  # XML has no way to write them
            server.put(BUCKET, f"{PREFIX}/{word}", b"x")
            tally.add(names=1)
        keys = list(store.list_keys())
    assert all(map(is_key, keys))
    assert keys
    assert all((tmp_path / key).resolve().is_relative_to(tmp_path) for key in keys)


def test_a_name_of_dlio_leads_nowhere_else(tally: Tally) -> None:
    """A path of a benchmark becomes a key, which has no way up, or an InvalidKeyError."""
    for word in WORDS:
        tally.add(names=1)
        try:
            assert is_key(key_of(word))
        except kvio.InvalidKeyError:
            continue


def test_a_name_of_a_shared_file_leads_nowhere_else(untouched: Path, tally: Tally) -> None:
    """One name in a directory: it is made there, or refused by a typed error."""
    for word in WORDS:
        if "/" in word:
            continue  # a path is the caller's own choice
        tally.add(names=1)
        path = os.path.join(untouched, word)
        try:
            with kvio.SharedFile.create(path, 4096, durability="visible") as file:
                file.pwrite(bytes(4096), 0)
                file.seal()
        except kvio.KvioError:
            continue
        assert word in os.listdir(untouched)
        os.unlink(path)
    assert os.listdir(untouched) == []


def test_a_url_is_opened_or_refused(untouched: Path, tally: Tally) -> None:
    """Nothing in a URL raises anything but an error of kvio's."""
    for word in WORDS[:: size(3, 1)]:
        for url in (
            f"posix-tmpfile://{untouched}?namespace={word}",
            f"posix-tmpfile://{untouched}/{word}-is-not-there?{word}=1",
            f"{word}://{untouched}",
            f"posix-tmpfile://{word}{untouched}",
        ):
            tally.add(names=1)
            try:
                kvio.open_store(url).close()
            except kvio.KvioError:
                continue


def test_a_command_leads_nowhere_else(
    untouched: Path, tally: Tally, capfd: pytest.CaptureFixture[str]
) -> None:
    """``put``, ``stat``, ``get`` and ``rm`` with each name: status above 0, or below the root."""
    source = untouched.parent / "x"
    for word in WORDS[:: size(12, 1)]:
        if "\0" in word or any(0xD800 <= ord(c) < 0xE000 for c in word):
            continue  # no argument of a program can be so
        for command in (["put", str(source)], ["stat"], ["get", "-"], ["rm"]):
            tally.add(names=1)
            arguments: list[Any] = [command[0], "--", str(untouched), word, *command[1:]]
            status = run(arguments)
            assert is_key(word) or status != 0, (word, command)
        capfd.readouterr()
