"""An export is what safetensors and torch's HuggingFaceStorageReader load, equal to torch's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvio

from .dcp import ALONE, CheckpointException, cause_of, dcp, memory_store, raw, torch

from kvio.connectors.torch_dcp import KvioSafetensorsWriter  # isort: skip

pytest.importorskip("safetensors", reason="safetensors is not installed")

from safetensors.torch import load_file

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(ALONE)]

BASE = torch.arange(100, dtype=torch.float32)
STATE: dict[str, Any] = {
    "model": {"weight": BASE.view(10, 10).clone(), "t": BASE.view(4, 25).t(), "é": BASE.bfloat16()},
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "bool": BASE > 7,
    "byte": torch.arange(3, dtype=torch.uint8),
    "trained": BASE.half().requires_grad_(),
    "float8": BASE[:5].to(torch.float8_e4m3fn),
}
NAMES = ["model.weight", "model.t", "model.é", *list(STATE)[1:]]
SPLITS = {"one file": None, "three files": {name: 1 + at % 3 for at, name in enumerate(NAMES)}}


def plain(root: Path) -> kvio.Store:
    """Open a store whose blocks are files."""
    root.mkdir(exist_ok=True)
    return kvio.open_store("posix-tmpfile", root=root, layout="plain")


def files(folder: Path) -> dict[str, dict[str, Any]]:
    """Load every file of an export with safetensors."""
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("split", SPLITS)
def test_an_export_equals_that_of_torch(split: str, tmp_path: Path) -> None:
    """The same files with the same tensors, and the same index, as HuggingFaceStorageWriter's."""
    into = SPLITS[split]
    stock = dcp.HuggingFaceStorageWriter(str(tmp_path / "stock"), fqn_to_index_mapping=into)
    # It refuses a view that is not contiguous.
    packed = {**STATE, "model": {k: v.contiguous() for k, v in STATE["model"].items()}}
    dcp.save(packed, storage_writer=stock)
    with plain(tmp_path / "root") as store:
        writer = KvioSafetensorsWriter(store, "export", fqn_to_index=into, level="visible")
        dcp.save(STATE, storage_writer=writer)
    ours = tmp_path / "root" / "export"
    expected, found = files(tmp_path / "stock"), files(ours)
    index, theirs = (
        json.loads((folder / "model.safetensors.index.json").read_text())
        for folder in (ours, tmp_path / "stock")
    )

    assert {name: set(tensors) for name, tensors in found.items()} == {
        name: set(tensors) for name, tensors in expected.items()
    }
    for name, tensors in expected.items():
        for fqn, tensor in tensors.items():
            assert (found[name][fqn].dtype, found[name][fqn].shape) == (tensor.dtype, tensor.shape)
            assert raw(found[name][fqn]) == raw(tensor)
    assert index == theirs


@pytest.mark.parametrize("split", SPLITS)
def test_torch_loads_an_export(split: str, tmp_path: Path) -> None:
    """HuggingFaceStorageReader fills a state dict from it."""
    with plain(tmp_path / "root") as store:
        writer = KvioSafetensorsWriter(store, "export", fqn_to_index=SPLITS[split], level="visible")
        dcp.save(STATE, storage_writer=writer)
    into = {
        name: torch.zeros_like(tensor)
        for name, tensor in {**STATE["model"], **STATE}.items()
        if name in ("weight", "scalar", "bool")
    }
    into["model.weight"] = into.pop("weight")
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "root" / "export"))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(into, storage_reader=reader, planner=planner)

    assert raw(into["model.weight"]) == raw(BASE)
    assert raw(into["scalar"]) == raw(torch.tensor(3))
    assert raw(into["bool"]) == raw(BASE > 7)


def test_an_export_that_failed_has_no_index_and_can_be_repeated() -> None:
    """The index is last: without it there is no export, and with it none replaces it."""

    class Fails:
        def __init__(self, store: Any, at: str) -> None:
            self._store, self._at = store, at

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def write_block(self, key: str, data: Any, *, if_exists: Any) -> Any:
            if self._at in key:
                raise kvio.StorageFullError("no room", key=key)
            return self._store.write_block(key, data, if_exists=if_exists)

    split = {"a": 1, "b": 2}
    with memory_store() as store:
        failing: Any = Fails(store, "00002-of")
        for over, value in ((failing, 1), (store, 2), (store, 3)):
            writer = KvioSafetensorsWriter(over, "export", fqn_to_index=split, level="visible")
            state = {"a": BASE + value, "b": BASE}
            if value == 2:
                dcp.save(state, storage_writer=writer)
                content = bytes(store.read_block("export/model-00001-of-00002.safetensors"))
                continue
            with pytest.raises(CheckpointException) as caught:
                dcp.save(state, storage_writer=writer)
            if value == 1:
                assert not store.contains("export/model.safetensors.index.json")
        after = bytes(store.read_block("export/model-00001-of-00002.safetensors"))

    assert isinstance(cause_of(caught), kvio.BlockExistsError)
    assert content == after
    assert content.endswith(raw(BASE + 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [("number", 5), ("complex", torch.complex(BASE, BASE)), ("sparse", torch.eye(3).to_sparse())],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(name: str, value: Any) -> None:
    """Nothing is written, and the error names the item."""
    with memory_store() as store:
        writer = KvioSafetensorsWriter(store, "export", level="visible")
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"good": BASE, name: value}, storage_writer=writer)
        left = list(store.list_keys())

    assert isinstance(cause_of(caught), kvio.UnsupportedError)
    assert repr(name) in str(cause_of(caught))
    assert left == []


def test_invalid_options_are_refused() -> None:
    """They are a ConfigError of the constructor, or name the tensor without a file."""
    with memory_store() as store:
        for options in ({"level": "accepted"}, {"fqn_to_index": {"a": 0}}):
            with pytest.raises(kvio.ConfigError):
                KvioSafetensorsWriter(store, "export", **options)
        writer = KvioSafetensorsWriter(store, "e", fqn_to_index={"b": 1}, level="visible")
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"a": BASE}, storage_writer=writer)

    assert "'a'" in str(cause_of(caught))
