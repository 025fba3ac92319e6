"""A manifest is restored, and a corrupt one raises only errors of kvio."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import kvio

from .dcp import ALONE, KvioReader, memory_store, save, torch

from torch.distributed.checkpoint.metadata import MetadataIndex  # isort: skip

from kvio.connectors.torch_dcp import manifest as manifests  # isort: skip

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(ALONE)]

STATE = {"a": torch.ones(3, 4).bfloat16(), "n": {"é\n": 0.5}, "z": torch.tensor(1)}


@pytest.fixture(scope="module")
def document() -> bytes:
    """Return the manifest of a small checkpoint."""
    with memory_store() as store:
        save(store, STATE)
        return bytes(store.read_block("run/manifest"))


def test_the_metadata_of_torch_is_restored(document: bytes) -> None:
    """dtype, sizes, strides, chunks, locations and the planner's mappings are unchanged."""
    read = manifests.decode(document, "run", "run/manifest")
    entry: Any = read.metadata.state_dict_metadata["a"]

    assert entry.properties.dtype is torch.bfloat16
    assert entry.properties.strides == (4, 1)
    assert entry.size == torch.Size([3, 4])
    assert isinstance(entry.size, torch.Size)
    assert [(c.offsets, c.sizes) for c in entry.chunks] == [(torch.Size([0, 0]), entry.size)]
    assert read.metadata.planner_data["n.é\n"] == ("n", "é\n")
    assert read.metadata.storage_data[MetadataIndex("a", (0, 0))].nbytes == 24
    assert manifests.decode(manifests.encode(read, "run"), "run", "k") == read


def test_a_manifest_is_good_under_another_name(document: bytes) -> None:
    """Keys in it are relative to the checkpoint's name: a copy of all blocks is a checkpoint."""
    read = manifests.decode(document, "elsewhere", "elsewhere/manifest")

    assert all(key.startswith(f"elsewhere/{read.version}/") for key in read.block_keys())


def refused(document: Any) -> None:
    """Decode an invalid manifest; only a kvio error may be raised."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises((kvio.CorruptBlockError, kvio.UnsupportedError)):
        manifests.decode(data, "run", "run/manifest")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "zip"),
        (("format_version",), 2),
        (("version",), "../other"),
        (("blocks", 0, 0), "../../other/manifest"),
        (("blocks", 0, 0), ""),
        (("blocks", 0, 1), 3),
        (("blocks", 0, 1), -1),
        (("items", 0, 3), 7),
        (("items", 0, 3), -2),
        (("items", 0, 4), 1 << 70),
        (("items", 0, 7), [1 << 40, 1 << 40]),
        (("items", 0, 6), "load"),
        (("items", 0, 6), "__name__"),
        (("state", "a", "dtype"), "os"),
        (("state", "a", "size"), [-1]),
        (("state", "a", "chunks"), [[0]]),
        (("state", "a"), None),
        (("state",), []),
        (("versions",), ["a b"]),
        (("planner_data",), {"eval": []}),
        (("storage_meta",), 5),
    ],
)
def test_an_inconsistent_manifest_is_refused(
    document: bytes, path: tuple[Any, ...], value: Any
) -> None:
    """Errors in a manifest are detected before any block is read."""
    parsed = json.loads(document)
    place = parsed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value

    refused(parsed)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'"x"'])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    """Other bytes are a CorruptBlockError, also if deeply nested."""
    refused(data)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a document."""
    found = [path] if path else []
    inner = (
        value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    )
    for key, each in inner:
        found += _leaves(each, (*path, key))
    return found


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(data=st.data())
def test_a_corrupt_manifest_raises_only_kvio_errors(document: bytes, data: st.DataObject) -> None:
    """A manifest with any value replaced is decoded, or refused with an error of kvio."""
    parsed = json.loads(document)
    *steps, last = data.draw(st.sampled_from(_leaves(parsed)))
    place = parsed
    for step in steps:
        place = place[step]
    place[last] = data.draw(JUNK)
    try:
        read = manifests.decode(json.dumps(parsed).encode(), "run", "run/manifest")
    except (kvio.CorruptBlockError, kvio.UnsupportedError):
        return
    assert all(key.startswith("run/") for key in read.block_keys())


def test_the_metadata_of_the_reader_names_its_load() -> None:
    """The reader's metadata names its load, as torch's own reader does."""
    with memory_store() as store:
        save(store, STATE)
        meta: Any = KvioReader(store, "run").read_metadata().storage_meta

    assert meta.checkpoint_id == "run"
    assert meta.load_id


def test_the_head_is_what_the_whole_manifest_says(document: bytes) -> None:
    """The head is read without the items, whatever they are, and from any form of JSON."""
    read = manifests.decode(document, "run", "run/manifest")
    items = document.index(b'"items":')
    spaced = json.dumps(json.loads(document), indent=1).encode()
    for data in (document, document[:items] + b'"items":[broken', spaced):
        head = manifests.decode_head(data, "run", "run/manifest")

        assert (head.version, head.sequence) == (read.version, read.sequence)
        assert (head.versions, head.removing) == (read.versions, read.removing)
        assert list(head.block_keys) == read.block_keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "zip"),
        ("format_version", 2),
        ("version", "../other"),
        ("sequence", -1),
        ("versions", ["a b"]),
        ("removing", 5),
        ("blocks", [["../../other/manifest", 1, None]]),
        ("blocks", None),
    ],
)
def test_an_inconsistent_head_is_refused(document: bytes, name: str, value: Any) -> None:
    """A save trusts no head that a load would refuse; its keys become removals."""
    parsed = json.loads(document)
    parsed[name] = value
    compact = json.dumps(parsed, separators=(",", ":")).encode()
    with pytest.raises((kvio.CorruptBlockError, kvio.UnsupportedError)):
        manifests.decode_head(compact, "run", "run/manifest")
