"""Checkpoints load with the values that were saved."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

import kvio

from .dcp import (
    ALONE,
    CheckpointException,
    KvioReader,
    KvioStager,
    KvioWriter,
    Watched,
    cause_of,
    dcp,
    durable_store,
    load,
    memory_store,
    raw,
    save,
    torch,
    zeros,
)

from kvio.connectors.torch_dcp import remove_unfinished, versions  # isort: skip

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(ALONE)]

BASE = torch.arange(100, dtype=torch.float32)
TENSORS = {
    "plain": BASE.view(10, 10).clone(),
    "every second": BASE[::2],
    "transposed": BASE.view(10, 10).t(),
    "expanded": torch.tensor([1.5]).expand(7),
    "one element of no dimension": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "bfloat16": BASE.bfloat16(),
    "float8": BASE[:9].to(torch.float8_e4m3fn),
    "bool": BASE > 50,
    "int64": BASE.long(),
    "conjugated": torch.complex(BASE, -BASE).conj(),
    "needs a gradient": BASE.clone().requires_grad_(),
}


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("what", TENSORS)
def test_a_tensor_comes_back(what: str, block_bytes: int) -> None:
    """Every element of a tensor is as it was saved, view or not, whatever its dtype."""
    with memory_store() as store:
        saved = {"before": torch.ones(3, dtype=torch.uint8), "t": TENSORS[what], "z": BASE.half()}
        save(store, saved, block_bytes=block_bytes)
        loaded = load(store, zeros(saved))

    for name, tensor in saved.items():
        assert loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor.resolve_conj())


def test_a_nested_state_comes_back(tmp_path: Path) -> None:
    """Nested dicts, lists, and items that are no tensors are restored."""
    state = {
        "model": OrderedDict(weight=torch.ones(4, 4), bias=torch.zeros(4)),
        "optimizer": {"state": {0: {"step": torch.tensor(5.0)}}, "groups": [{"lr": 0.1}]},
        "epoch": 7,
        "note": "text",
    }
    with durable_store(tmp_path) as store:
        save(store, state, level="durable")
        into = {
            "model": OrderedDict(weight=torch.zeros(4, 4), bias=torch.ones(4)),
            "optimizer": {"state": {0: {"step": torch.tensor(0.0)}}, "groups": [{"lr": 0.0}]},
            "epoch": 0,
            "note": "",
        }
        loaded = load(store, into)

    assert raw(loaded["model"]["weight"]) == raw(torch.ones(4, 4))
    assert loaded["optimizer"]["state"][0]["step"] == 5
    assert (loaded["optimizer"]["groups"], loaded["epoch"]) == ([{"lr": 0.1}], 7)
    assert loaded["note"] == "text"


def test_pickled_bytes_are_loaded_only_if_trusted() -> None:
    """A BytesIO in a state is an object like any other, loaded only with weights_only=False."""
    with memory_store() as store:
        save(store, {"stream": io.BytesIO(b"as it was")})
        with pytest.raises(CheckpointException) as caught:
            load(store, {"stream": None})
        loaded = load(store, {"stream": None}, weights_only=False)

    assert isinstance(cause_of(caught), kvio.UnsupportedError)
    assert "'stream'" in str(cause_of(caught))
    assert loaded["stream"].getvalue() == b"as it was"


def test_tensors_are_read_into_their_own_memory() -> None:
    """A tensor that needs a whole item is filled directly; another dtype is converted."""
    with memory_store() as store:
        save(store, {"a": BASE, "b": BASE})
        into = {"a": torch.zeros(100), "b": torch.zeros(100, dtype=torch.float64)}
        where = into["a"].data_ptr()
        loaded = load(store, into)

    assert loaded["a"].data_ptr() == where
    assert raw(loaded["a"]) == raw(BASE)
    assert raw(loaded["b"]) == raw(BASE.double())


def test_a_strided_target_is_filled() -> None:
    """A tensor whose elements lie apart in memory gets them, and nothing between them."""
    with memory_store() as store:
        save(store, {"a": BASE})
        room = torch.full((200,), -1.0)
        load(store, {"a": room[::2]})

    assert raw(room[::2]) == raw(BASE)
    assert bool((room[1::2] == -1).all())


def test_part_of_a_checkpoint_is_loaded() -> None:
    """A state with fewer keys than were saved loads those."""
    with memory_store() as store:
        save(store, {"a": BASE, "b": BASE + 1, "c": BASE + 2, "n": 5})
        loaded = load(store, {"b": torch.zeros(100)})

    assert raw(loaded["b"]) == raw(BASE + 1)


def test_small_tensors_share_blocks_and_large_ones_do_not() -> None:
    """Items are gathered up to block_bytes; one that is larger is a block of its own."""
    with memory_store() as store:
        state = {f"{n:02d}": torch.full((25,), float(n)) for n in range(10)}
        save(store, {**state, "x": torch.zeros(1000)}, block_bytes=500)
        sizes = [store.stat_block(key).nbytes for key in store.list_keys("run/") if "rank-" in key]

    assert sorted(sizes) == [500, 500, 4000]


def test_the_manifest_is_json_and_comes_last(tmp_path: Path) -> None:
    """The manifest has a fixed key, is written after all data, and is no pickle."""
    order: list[str] = []
    with durable_store(tmp_path, layout="plain") as store:
        save(Watched(store, order.append), {"a": BASE, "n": {"lr": 0.1}}, level="durable")
    document = json.loads((tmp_path / "run" / "manifest").read_bytes())

    assert order[-1] == "run/manifest"
    assert document["format"] == "kvio-torch-dcp"
    assert document["state"]["a"]["size"] == [100]
    assert document["state"]["n.lr"] == "bytes"
    ((suffix, nbytes, _),) = document["blocks"]
    item = next(item for item in document["items"] if item[0] == "a")
    block = (tmp_path / "run" / document["version"] / suffix).read_bytes()
    assert len(block) == nbytes
    assert block[item[4] : item[4] + item[5]] == raw(BASE)


def test_older_saves_are_kept_as_asked_and_removed_after() -> None:
    """The newest *keep* saves load, each with its own values; nothing of others is left."""
    with memory_store() as store:
        for value in range(5):
            save(store, {"a": torch.full((10,), float(value))}, keep=3)
        kept = versions(store, "run")
        values = [load(store, {"a": torch.zeros(10)}, version=v)["a"][0].item() for v in kept]
        in_store = {key.split("/")[1] for key in store.list_keys("run/")}

    assert values == [4, 3, 2]
    assert in_store == {"manifest", *kept}


def test_a_failed_removal_is_repeated_by_the_next_save() -> None:
    """A failed removal does not fail the save; the next save removes the blocks."""

    class Stubborn(Watched):
        def delete_block(self, key: str) -> bool:
            raise kvio.StorageError("no", key=key)

    with memory_store() as store:
        for value in range(3):
            save(Stubborn(store, lambda _: None), {"a": torch.full((10,), float(value))})
        listed = versions(store, "run")
        left = {key.split("/")[1] for key in store.list_keys("run/")} - {"manifest"}
        save(store, {"a": torch.full((10,), 9.0)})
        after = {key.split("/")[1] for key in store.list_keys("run/")} - {"manifest"}

    assert len(listed) == 1
    assert len(left) == 3
    assert len(after) == 1


def test_names_do_not_mix() -> None:
    """Each name is a separate checkpoint; checkpoint_id replaces the name."""
    with memory_store() as store:
        writer = KvioWriter(store, "run", level="visible")
        for name in ("step-1", "step-1/ema", None):
            value = torch.full((4,), float(len(name or "")))
            dcp.save({"a": value}, checkpoint_id=name, storage_writer=writer)
        loaded = {
            name: load(store, {"a": torch.zeros(4)}, name)["a"][0].item()
            for name in ("step-1", "step-1/ema", "step-1/ema")
        }
        reader = KvioReader(store, "run")
        by_id = {"a": torch.zeros(4)}
        dcp.load(by_id, checkpoint_id="step-1", storage_reader=reader)

    assert loaded == {"step-1": 6, "step-1/ema": 10}
    assert by_id["a"][0] == 6


def test_a_writer_can_be_pickled_and_is_no_stager(tmp_path: Path) -> None:
    """Torch may pickle a writer for another process, and does not use it as a stager."""
    from torch.distributed.checkpoint.staging import AsyncStager

    with durable_store(tmp_path) as store:
        writer = pickle.loads(pickle.dumps(KvioWriter(store, "run", keep=2)))
        for value in (1, 2, 3):
            dcp.save({"a": BASE + value}, storage_writer=writer)
        writer._store.close()  # its own: the pickle opened it again
        found = versions(store, "run")

    assert len(found) == 2
    assert not isinstance(writer, AsyncStager)
    assert isinstance(KvioStager(), AsyncStager)


def test_only_blocks_of_dead_saves_are_removed() -> None:
    """remove_unfinished removes and returns only blocks of this name that are in no manifest."""
    with memory_store() as store:
        save(store, {"a": BASE})
        save(store, {"a": BASE}, "run/inner")
        store.write_block("run/00000009-0123456789abcdef/rank-00000/000000", b"left")
        store.write_block("run/other", b"not ours")
        before = set(store.list_keys())
        named = remove_unfinished(store, "run", dry_run=True)
        untouched = set(store.list_keys())
        removed = remove_unfinished(store, "run")
        left = set(store.list_keys())

    assert named == removed == ["run/00000009-0123456789abcdef/rank-00000/000000"]
    assert untouched == before
    assert left == before - set(removed)


UNCLOSED = """
import sys
import torch, torch.distributed.checkpoint as dcp
import kvio
from kvio.connectors.torch_dcp import KvioWriter
store = kvio.open_store("posix-tmpfile", root=sys.argv[1], create=True)
writer = KvioWriter(store, "model", level="visible")
dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
"""


def test_a_program_that_leaves_its_store_open_ends_in_silence(tmp_path: Path) -> None:
    """Torch keeps objects until modules are cleared; a finaliser then has no functions to call."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning", "-c", UNCLOSED, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert done.stderr == ""
