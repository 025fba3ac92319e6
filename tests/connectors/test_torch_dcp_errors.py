"""Errors of saving and loading name the item and keep the older checkpoint."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvio

from .dcp import (
    ALONE,
    CheckpointException,
    KvioReader,
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
)

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # isort: skip

from kvio.connectors.torch_dcp import versions  # isort: skip


pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(ALONE)]

BASE = torch.arange(100, dtype=torch.float32)


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 170])
def test_an_invalid_name_is_refused_first(name: str) -> None:
    """A checkpoint's name follows the rules of keys, for reader and writer."""
    with memory_store() as store:
        for kind in (KvioWriter, KvioReader):
            with pytest.raises(kvio.InvalidKeyError):
                kind(store, name)
        assert not KvioWriter.validate_checkpoint_id(name)


def test_a_missing_checkpoint_is_named() -> None:
    """The error has the name of the checkpoint and the store."""
    with memory_store() as store, pytest.raises(CheckpointException) as caught:
        load(store, {"a": BASE.clone()}, "nothing-here")

    assert "there is no checkpoint 'nothing-here'" in str(cause_of(caught))
    assert "memory" in str(cause_of(caught))


def test_a_later_format_is_refused() -> None:
    """A manifest of a later format is neither loaded nor overwritten."""
    with memory_store() as store:
        save(store, {"a": BASE})
        document = json.loads(bytes(store.read_block("run/manifest")))
        document["format_version"] = 2
        later = json.dumps(document).encode()
        store.write_block("run/manifest", later, if_exists="replace")
        with pytest.raises(kvio.UnsupportedError, match="format version 2"):
            KvioReader(store, "run").read_metadata()
        with pytest.raises(CheckpointException):
            save(store, {"a": BASE})
        after = bytes(store.read_block("run/manifest"))

    assert after == later


def data_key(store: Any) -> str:
    """Return the key of the only data block."""
    (key,) = [key for key in store.list_keys("run/") if "rank-" in key]
    return str(key)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "another", "gone"])
def test_an_error_of_a_corrupt_block_names_its_tensor(damage: str, tmp_path: Path) -> None:
    """A corrupt block is an error that names the block and the items in it."""
    with durable_store(tmp_path) as store:
        save(store, {"weight": BASE}, level="durable")
        key = data_key(store)
        if damage == "flipped":
            (path,) = [p for p in tmp_path.rglob("*") if p.name.endswith("~000000")]
            content = bytearray(path.read_bytes())
            content[17] ^= 1
            path.write_bytes(content)
        elif damage == "gone":
            store.delete_block(key)
        else:
            length = {"shorter": 399, "longer": 401, "another": 400}[damage]
            store.write_block(key, b"x" * length, if_exists="replace")
        with pytest.raises(CheckpointException) as caught:
            load(store, {"weight": torch.zeros(100)})
    error = cause_of(caught)

    kind = kvio.BlockNotFoundError if damage == "gone" else kvio.CorruptBlockError
    assert type(error) is kind
    assert error.key == key
    assert "'weight'" in str(error)


def test_a_length_in_a_manifest_is_checked_before_allocating() -> None:
    """The block's length is checked before a buffer of the manifest's length is allocated."""
    with memory_store() as store:
        save(store, {"weight": BASE})
        document = json.loads(bytes(store.read_block("run/manifest")))
        document["blocks"][0][1] = 1 << 60
        store.write_block("run/manifest", json.dumps(document).encode(), if_exists="replace")
        with pytest.raises(CheckpointException) as caught:
            load(store, {"weight": torch.zeros(100)})

    assert isinstance(cause_of(caught), kvio.CorruptBlockError)
    assert "400 bytes" in str(cause_of(caught))


def test_an_out_of_memory_error_names_the_block(tmp_path: Path) -> None:
    """The block has the length in its manifest, which is more than all memory."""
    with kvio.open_store("hybrid", root=tmp_path, layout="plain") as store:
        save(store, {"a": BASE})
        document = json.loads(bytes(store.read_block("run/manifest")))
        row = document["blocks"][0]
        row[1:] = [1 << 40, None]
        store.write_block("run/manifest", json.dumps(document).encode(), if_exists="replace")
        key = f"run/{document['version']}/{row[0]}"
        os.truncate(tmp_path / key, 1 << 40)

        with pytest.raises(CheckpointException) as caught:
            load(store, {"a": BASE.clone()})
        error = cause_of(caught)
        assert isinstance(error, kvio.OutOfMemoryError)
        assert (error.key, error.nbytes) == (key, 1 << 40)


def test_a_damaged_manifest_stops_loading_but_not_saving() -> None:
    """A corrupt manifest is not loaded; the next save replaces it."""
    with memory_store() as store:
        save(store, {"a": BASE})
        store.write_block("run/manifest", b"{", if_exists="replace")
        with pytest.raises(kvio.CorruptBlockError):
            KvioReader(store, "run").read_metadata()
        save(store, {"a": BASE + 1})
        loaded = load(store, {"a": torch.zeros(100)})

    assert raw(loaded["a"]) == raw(BASE + 1)


def test_a_store_without_the_requested_level_is_refused() -> None:
    """The default level is durable, which a store in memory does not provide."""
    with memory_store() as store:
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"a": BASE}, storage_writer=KvioWriter(store, "run"))
        manifest = store.contains("run/manifest")

    assert isinstance(cause_of(caught), kvio.UnsupportedError)
    assert "durability='durable'" in str(cause_of(caught))
    assert not manifest


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta")],
    ids=["sparse", "meta"],
)
def test_a_tensor_without_plain_elements_is_refused(tensor: Any) -> None:
    """A tensor without dense elements is refused by name, and nothing is published."""
    with memory_store() as store:
        with pytest.raises(CheckpointException) as caught:
            save(store, {"good": BASE, "odd": tensor}, block_bytes=1)
        left = list(store.list_keys())

    assert isinstance(cause_of(caught), kvio.UnsupportedError)
    assert "'odd'" in str(cause_of(caught))
    assert left == []


class _Adds(DefaultSavePlanner):  # type: ignore[misc, unused-ignore]  # Any where torch is absent
    def __init__(self, added: Any) -> None:
        super().__init__()
        self.added = added

    def create_global_plan(self, plans: Any) -> Any:
        plans, metadata = super().create_global_plan(plans)
        metadata.planner_data = self.added
        return plans, metadata


def test_planner_data_is_restored_or_refused() -> None:
    """A planner's values are restored with their types; values without JSON form are refused."""
    plain = {"a": (1, [2.5, None, True]), 3: "x"}
    with memory_store() as store:
        writer = KvioWriter(store, "run", level="visible")
        dcp.save({"a": BASE}, storage_writer=writer, planner=_Adds(plain))
        found = KvioReader(store, "run").read_metadata().planner_data
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"a": BASE}, storage_writer=writer, planner=_Adds({"a": {1}}))

    assert found == plain
    assert isinstance(cause_of(caught), kvio.UnsupportedError)
    assert "builtins.set" in str(cause_of(caught))


class _CachesA(DefaultSavePlanner):  # type: ignore[misc, unused-ignore]
    """Its own name: torch caches plans by the name of the class, in all of the process."""


class _CachesB(DefaultSavePlanner):  # type: ignore[misc, unused-ignore]
    pass


class _CachesC(DefaultSavePlanner):  # type: ignore[misc, unused-ignore]
    pass


def test_a_writer_saves_with_cached_plans() -> None:
    """Every save has its own values and blocks, also if the plan changes in between."""
    with memory_store() as store:
        writer = KvioWriter(store, "run", level="visible", keep=5)
        for value, more in ((1, {}), (2, {}), (3, {"b": BASE}), (4, {"b": BASE * 2}), (5, {})):
            planner = _CachesA(enable_plan_caching=True)
            dcp.save({"a": BASE + value, **more}, storage_writer=writer, planner=planner)
        kept = versions(store, "run")
        loaded = [load(store, {"a": torch.zeros(100)}, version=version) for version in kept]
        both = load(store, {"a": torch.zeros(100), "b": torch.zeros(100)}, version=kept[1])

    assert [raw(state["a"]) for state in loaded] == [raw(BASE + n) for n in (5, 4, 3, 2, 1)]
    assert raw(both["b"]) == raw(BASE * 2)


def test_a_cached_plan_that_a_writer_has_not_seen_is_refused() -> None:
    """The plan that torch does not send again would have the locations of an older save."""
    with memory_store() as store:
        for attempt in range(2):
            planner = _CachesB(enable_plan_caching=True)
            writer = KvioWriter(store, "run", level="visible")
            if attempt == 0:
                dcp.save({"a": BASE}, storage_writer=writer, planner=planner)
                continue
            with pytest.raises(CheckpointException) as caught:
                dcp.save({"a": BASE + 1}, storage_writer=writer, planner=planner)
        loaded = load(store, {"a": torch.zeros(100)})

    assert "enable_plan_caching" in str(cause_of(caught))
    assert raw(loaded["a"]) == raw(BASE)


def test_a_cached_plan_of_another_writer_is_refused() -> None:
    """Two writers with one planner's cache never publish items that are not in the metadata."""
    with memory_store() as store:
        first, second = (KvioWriter(store, name, level="visible") for name in ("one", "two"))
        plan = partial(_CachesC, enable_plan_caching=True)
        dcp.save({"a": BASE}, storage_writer=first, planner=plan())
        dcp.save({"a": BASE, "b": BASE}, storage_writer=second, planner=plan())
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"a": BASE + 1, "b": BASE + 1}, storage_writer=first, planner=plan())
        loaded = load(store, {"a": torch.zeros(100)}, "one")

    assert "another writer" in str(cause_of(caught))
    assert raw(loaded["a"]) == raw(BASE)


def test_a_save_without_collectives_is_refused() -> None:
    """The coordinator must know when all ranks have finished."""
    with memory_store() as store, pytest.raises(kvio.UnsupportedError, match="use_collectives"):
        dcp.save(
            {"a": BASE},
            storage_writer=KvioWriter(store, "run", level="visible"),
            use_collectives=False,
        )


def test_an_overtaken_save_without_the_stager_is_an_error() -> None:
    """A save that ends after a later save publishes nothing and raises an error."""
    with memory_store() as store:

        def overtake(key: str) -> None:
            if "rank-" in key:
                save(store, {"a": BASE + 2})
                save(store, {"a": BASE + 2})

        with pytest.raises(CheckpointException) as caught:
            save(Watched(store, overtake), {"a": BASE + 1})
        loaded = load(store, {"a": torch.zeros(100)})

    assert isinstance(cause_of(caught), kvio.BlockExistsError)
    assert "KvioStager" in str(cause_of(caught))
    assert raw(loaded["a"]) == raw(BASE + 2)


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_mixed() -> None:
    """Ranks that read different saves raise an error."""
    with memory_store() as store:
        plans = []
        for value in (1, 2):
            save(store, {"a": BASE + value})
            reader = KvioReader(store, "run")
            reader.read_metadata()
            plans.append(reader.prepare_local_plan(dcp.LoadPlan([])))

        with pytest.raises(kvio.BlockNotFoundError, match="replaced while"):
            reader.prepare_global_plan(plans)


@pytest.mark.parametrize("options", [{"keep": 0}, {"block_bytes": 0}, {"level": "accepted"}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    """An invalid option is a ConfigError of the constructor."""
    with memory_store() as store, pytest.raises(kvio.ConfigError):
        KvioWriter(store, "run", **options)
