"""A manifest comes back as it was, and damage to it is never anything but an error of kvio."""

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
    """Give the manifest of a small checkpoint."""
    with memory_store() as store:
        save(store, STATE)
        return bytes(store.read_block("run/manifest"))


def test_what_torch_knows_of_a_checkpoint_comes_back(document: bytes) -> None:
    """dtype, sizes, strides, chunks, places and the planner's mappings are as torch made them."""
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
    """Blocks are named from the checkpoint's name on: a copy of all its blocks is a checkpoint."""
    read = manifests.decode(document, "elsewhere", "elsewhere/manifest")

    assert all(key.startswith(f"elsewhere/{read.version}/") for key in read.block_keys())


def refused(document: Any) -> None:
    """Decode what is no manifest; nothing but a kvio error may come."""
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
def test_a_manifest_that_contradicts_itself_is_refused(
    document: bytes, path: tuple[Any, ...], value: Any
) -> None:
    """Whatever is wrong in a manifest is found when it is read, before any block is."""
    parsed = json.loads(document)
    place = parsed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value

    refused(parsed)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'"x"'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    """Other bytes are a CorruptBlockError, however they nest."""
    refused(data)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths to every value in a document."""
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
def test_no_damage_makes_anything_but_a_kvio_error(document: bytes, data: st.DataObject) -> None:
    """A manifest with any one value replaced is read, or refused with an error of kvio."""
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


def test_torch_reads_what_the_reader_gives() -> None:
    """The reader's metadata names its load, as torch's own reader does."""
    with memory_store() as store:
        save(store, STATE)
        meta: Any = KvioReader(store, "run").read_metadata().storage_meta

    assert meta.checkpoint_id == "run"
    assert meta.load_id
