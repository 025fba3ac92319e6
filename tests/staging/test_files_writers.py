"""Programs that write and read files do so on a staging tier, unchanged: the bytes are the same."""

from __future__ import annotations

import io
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import LONG_S, ControlledBackend, open_controlled, staged

SMALL = 64 * kvio.KiB  # pieces of 8 KiB: what follows is longer than the tier
LARGE = 64 * kvio.MiB

ARRAY = np.arange(40_000, dtype=np.float64).reshape(200, 200)
WRITERS: dict[str, Callable[[Any], object]] = {
    "pickle": lambda file: pickle.dump({"a": [1, 2], "b": payloads.payload(90_000, 1)}, file),
    "pickle-5": lambda file: pickle.dump([ARRAY, np.asfortranarray(ARRAY)], file, protocol=5),
    "npy": lambda file: np.save(file, ARRAY),
    "npy-fortran": lambda file: np.save(file, np.asfortranarray(ARRAY)),
    "npy-strided": lambda file: np.save(file, ARRAY[::2, ::3]),
    "tofile": lambda file: file.write(ARRAY),
    "copyfileobj": lambda file: shutil.copyfileobj(io.BytesIO(payloads.payload(200_000, 2)), file),
}


@pytest.fixture
def store() -> Iterator[WrappedStore[ControlledBackend]]:
    """Blocks in memory."""
    with open_controlled() as store:
        yield store


@pytest.fixture(params=[LARGE, SMALL], ids=["staged", "spilled"])
def tier(
    request: pytest.FixtureRequest, store: WrappedStore[ControlledBackend], tmp_path: Path
) -> Iterator[kvio.StagingTier]:
    """A tier that has room for all, and one that has not."""
    with staged(store, request.param, timeout=LONG_S, spool=tmp_path) as tier:
        yield tier


def same_as_in_memory(tier: kvio.StagingTier, write: Callable[[Any], object]) -> None:
    """Let a program write to a block and to memory; both must have the same bytes."""
    expected = io.BytesIO()
    write(expected)
    with tier.open("k", "wb") as file:
        write(file)
    assert file.receipt is not None
    file.receipt.wait(timeout=LONG_S)

    assert bytes(tier.read_block("k", consistency="backend")) == expected.getvalue()
    assert tier.store.verify_block("k").ok


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_leaves_the_same_bytes_as_in_memory(tier: kvio.StagingTier, writer: str) -> None:
    """Whatever sizes it writes in."""
    same_as_in_memory(tier, WRITERS[writer])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_numpy_archives_are_read_back(tier: kvio.StagingTier, save: Any) -> None:
    """Their writer goes back to patch the header of each member."""
    tier.pause()
    with tier.open("k", "wb") as file:
        save(file, a=ARRAY, b=np.ones(3), c=np.arange(50_000))
    for _ in ("staged, if it fits", "stored"):
        with tier.open("k", "rb") as reader, np.load(reader) as archive:
            assert sorted(archive) == ["a", "b", "c"]
            assert (archive["a"] == ARRAY).all()
            assert archive["b"].tolist() == [1, 1, 1]
            assert (archive["c"] == np.arange(50_000)).all()
        tier.resume()
        tier.barrier(timeout=LONG_S)


def test_pickles_and_arrays_are_read_back(tier: kvio.StagingTier) -> None:
    """From staging memory and from the store."""
    with tier.open("pickle", "wb") as file:
        pickle.dump({"a": ARRAY, "b": "text"}, file)
    with tier.open("npy", "wb") as file:
        np.save(file, ARRAY)
        np.save(file, np.ones(3))
    for _ in ("staged, if it fits", "stored"):
        with tier.open("pickle", "rb") as reader:
            assert pickle.load(reader)["b"] == "text"
        with tier.open("npy", "rb") as reader:
            assert (np.load(reader) == ARRAY).all()
            assert np.load(reader).tolist() == [1, 1, 1]
        tier.barrier(timeout=LONG_S)


def test_archives_of_files_are_written_and_read(tier: kvio.StagingTier) -> None:
    """``zipfile`` and ``tarfile``, of which both seek."""
    data = payloads.payload(100_000, 5)
    with tier.open("zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("one", data)
        archive.writestr("two", b"2")
    with tier.open("tar", "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        member = tarfile.TarInfo("one")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    with tier.open("zip", "rb") as reader, zipfile.ZipFile(reader) as archive:
        assert archive.testzip() is None
        assert archive.read("one") == data
    with tier.open("tar", "rb") as reader, tarfile.open(fileobj=reader) as tar:
        extracted = tar.extractfile("one")
        assert extracted is not None
        assert extracted.read() == data


def test_a_pickle_that_fails_publishes_nothing(tier: kvio.StagingTier) -> None:
    """What it had written by then is gone, and the older block stands."""
    tier.write_block("k", b"older").wait(timeout=LONG_S)
    with pytest.raises(Exception, match="lambda"), tier.open("k", "wb") as file:
        pickle.dump([payloads.payload(100_000, 1), lambda: None], file)

    assert bytes(tier.read_block("k")) == b"older"
    assert tier.stats().used_bytes == 0


def test_safetensors_are_written_and_read(tier: kvio.StagingTier) -> None:
    """As bytes, which is what it offers beside files of the system."""
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = {"a": ARRAY, "b": np.ones(3)}
    with tier.open("k", "wb") as file:
        file.write(safetensors.save(tensors))
    with tier.open("k", "rb") as reader:
        loaded = safetensors.load(reader.read())

    assert (loaded["a"] == ARRAY).all()
    assert (loaded["b"] == np.ones(3)).all()


# torch


@pytest.fixture
def torch() -> Any:
    """The library, where it is installed."""
    return pytest.importorskip("torch", reason="torch is not installed")


def _state(torch: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(150, 200), torch.nn.ReLU(), torch.nn.Linear(200, 7))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 150)).sum().backward()
    optimizer.step()
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    weights["view"] = weights["0.weight"][::2]
    return {"model": weights, "optimizer": optimizer.state_dict(), "step": 5}


def _equal(torch: Any, left: dict[str, Any], right: dict[str, Any]) -> bool:
    same = left["step"] == right["step"] and left["model"].keys() == right["model"].keys()
    states = zip(
        left["optimizer"]["state"].items(), right["optimizer"]["state"].items(), strict=True
    )
    return (
        same
        and all(torch.equal(value, right["model"][name]) for name, value in left["model"].items())
        and all(
            number == other and all(torch.equal(a[name], b[name]) for name in a)
            for (number, a), (other, b) in states
        )
    )


@pytest.mark.torch
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_torch_save_leaves_the_same_bytes_as_in_memory(
    tier: kvio.StagingTier, torch: Any, form: str
) -> None:
    """In both of its formats."""
    state, zipped = _state(torch), form == "zip"
    same_as_in_memory(
        tier, lambda file: torch.save(state, file, _use_new_zipfile_serialization=zipped)
    )


@pytest.mark.torch
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_torch_load_reads_what_is_staged_and_what_is_stored(
    tier: kvio.StagingTier, torch: Any, form: str
) -> None:
    """With its restricted unpickler; every tensor is equal."""
    state = _state(torch)
    tier.pause()
    with tier.open("k", "wb") as file:
        torch.save(state, file, _use_new_zipfile_serialization=form == "zip")
    for _ in ("staged, if it fits", "stored"):
        with tier.open("k", "rb") as reader:
            assert _equal(torch, torch.load(reader, weights_only=True), state)
        tier.resume()
        tier.barrier(timeout=LONG_S)


@pytest.mark.torch
def test_a_full_tier_stops_torch_save(store: WrappedStore[ControlledBackend], torch: Any) -> None:
    """It hides why behind an error of its own; the file fails, and nothing is published."""
    state = _state(torch)
    with staged(store, SMALL) as tier:
        with (
            pytest.raises(kvio.StorageFullError, match="spool="),
            tier.open("k", "wb") as file,
        ):
            torch.save(state, file)

        assert not tier.contains("k")
        assert tier.stats().used_bytes == 0


@pytest.mark.torch
def test_safetensors_of_torch_are_written_and_read(tier: kvio.StagingTier, torch: Any) -> None:
    """As bytes."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    tensors = {"a": torch.randn(100, 300), "b": torch.ones(3)}
    with tier.open("k", "wb") as file:
        file.write(safetensors.save(tensors))
    with tier.open("k", "rb") as reader:
        loaded = safetensors.load(reader.read())

    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())


@pytest.mark.torch
@pytest.mark.parametrize("capacity", [SMALL, LARGE])
def test_files_in_the_memory_of_a_device_can_be_patched(
    store: WrappedStore[ControlledBackend], torch: Any, tmp_path: Path, capacity: int
) -> None:
    """The bytes that no processor sees are fetched, changed and put back."""
    del torch
    data = bytearray(payloads.payload(150_000, 1))
    with (
        staged(store, capacity, memory="cpu", spool=tmp_path) as tier,
        tier.open("k", "wb") as file,
    ):
        file.write(data[:120_000])
        file.seek(5)
        file.write(b"patched")
        file.seek(8_190)
        file.write(b"edges")
        file.seek(120_000)
        file.write(data[120_000:])
        file.close()
        data[5:12], data[8_190:8_195] = b"patched", b"edges"
        assert file.receipt is not None
        file.receipt.wait(timeout=LONG_S)

        assert store.wrapper.peek("k") == bytes(data)
