"""docs/recipes/safetensors.md is true: the format is safetensors', and no tensor is copied."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvio
from tests import snippets

from .running import ENVIRONMENT, require

require("torch", "safetensors")
import safetensors  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402

from kvio.connectors.safetensors import load, save  # noqa: E402

from .copies import NBYTES  # noqa: E402

pytestmark = [pytest.mark.torch]

PAGE = "docs/recipes/safetensors.md"
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16),
    *(torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.float64, torch.int64),
    *(torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def state() -> dict[str, Any]:
    """Make a tensor of every dtype, and such as are often got wrong."""
    values = torch.arange(15).reshape(3, 5)
    found = {str(dtype): values.to(dtype) for dtype in DTYPES}
    return {
        **found,
        "no bytes": torch.zeros(0, 3),
        "number": torch.tensor(3.5),
        "columns": torch.arange(6.0).reshape(2, 3).T,
        "every second": torch.arange(10)[::2],
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        'a "name" \\ ü': torch.tensor([True]),
    }


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what makes a tensor equal to another, bit for bit."""
    plain = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(plain.tolist())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two states are equal, bit for bit."""
    return {k: bits(v) for k, v in one.items()} == {k: bits(v) for k, v in other.items()}


@pytest.fixture
def memory() -> Any:
    """Yield a store in memory."""
    with kvio.open_store("memory") as store:
        yield store


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets.snippets(PAGE), ids=str)
def test_a_snippet_runs(snippet: snippets.Snippet, real_disk: Path) -> None:
    """The programs of the page run as they stand."""
    snippets.run(snippet, real_disk, env=ENVIRONMENT)


def test_what_is_saved_comes_back_bit_for_bit(memory: kvio.Store) -> None:
    """Every dtype, views, empty tensors, and names that JSON must escape."""
    save(memory, "model", state())

    assert same(load(memory, "model"), state())


def test_safetensors_reads_what_kvio_wrote(tmp_path: Path) -> None:
    """A block of a plain store is a file for safetensors, metadata included."""
    with kvio.open_store(tmp_path, layout="plain") as store:
        save(store, "model.safetensors", state(), metadata={"format": "pt"})

    path = tmp_path / "model.safetensors"
    assert same(safetensors.torch.load_file(path), state())
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_kvio_reads_what_safetensors_wrote(memory: kvio.Store) -> None:
    """The bytes of safetensors.torch.save are a block that loads."""
    given = {name: tensor.resolve_conj().contiguous() for name, tensor in state().items()}
    memory.write_block("model", safetensors.torch.save(given, {"format": "pt"}))

    assert same(load(memory, "model"), state())


def test_tensors_are_views_of_the_memory_that_was_read(memory: kvio.Store) -> None:
    """All of one load lie in one allocation, aligned, and do not overlap."""
    save(memory, "model", {"a": torch.ones(1000), "b": torch.ones(1000, dtype=torch.float64)})

    found = load(memory, "model")
    found["b"].zero_()

    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    places = [tensor.data_ptr() for tensor in found.values()]
    assert max(places) - min(places) == 8000
    assert len(storages) <= 2
    assert all(place % 8 == 0 for place in places)
    assert found["a"].sum() == 1000


def test_an_empty_state_is_a_block_too(memory: kvio.Store) -> None:
    """No tensors are no error, here and in safetensors."""
    save(memory, "model", {})

    assert load(memory, "model") == {}
    assert safetensors.torch.load(bytes(memory.read_block("model"))) == {}


def test_tensors_that_are_not_aligned_are_loaded(memory: kvio.Store) -> None:
    """Other writers may leave a header of any length."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((1 - len(header)) % 8)
    data = len(header).to_bytes(8, "little") + header + torch.ones(2).numpy().tobytes()
    memory.write_block("model", data)

    found = load(memory, "model")["a"]
    assert found.tolist() == [1.0, 1.0]
    assert found.data_ptr() % 4 == 0


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_what_the_format_does_not_have_is_refused(
    tensor: torch.Tensor, says: str, memory: kvio.Store
) -> None:
    """The error names the tensor and what it is, and nothing is stored."""
    with pytest.raises(kvio.UnsupportedError, match=f"'odd'.*{says}"):
        save(memory, "model", {"odd": tensor})

    assert not memory.contains("model")


def entry(start: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> Any:
    """Make what a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


BROKEN: dict[str, Any] = {
    "no header": b"",
    "a header beyond the end": (100).to_bytes(8, "little") + b"{}",
    "a header beyond all memory": b"\xff" * 8 + b"{}",
    "no JSON": b"{a: 1}",
    "no UTF-8": b'{"\xff": 1}',
    "nested without end": b"[" * 100_000,
    "a list": b"[1, 2]",
    "a number for a tensor": {"a": 1},
    "nothing for a tensor": {"a": None},
    "no place": {"a": {"dtype": "F32", "shape": [1]}},
    "a negative place": {"a": entry(-4, 0)},
    "a place that is no number": {"a": entry("0", "4")},
    "a place that is a truth value": {"a": entry(False, 4)},
    "a place beyond the end": {"a": entry(0, 12, [3])},
    "bytes of no tensor": {"a": entry(0, 4)},
    "a hole": {"a": entry(4, 8)},
    "tensors that overlap": {"a": entry(0, 8, [2]), "b": entry(4, 8)},
    "another shape": {"a": entry(0, 8, [3])},
    "a shape beyond all memory": {"a": entry(0, 8, [1 << 62, 1 << 62])},
    "a negative shape": {"a": entry(0, 8, [-1, -2])},
}


@pytest.mark.parametrize("which", BROKEN)
def test_a_block_that_is_not_in_the_format_is_an_error(which: str, memory: kvio.Store) -> None:
    """Whatever a header says, it is a CorruptBlockError that names the block."""
    found = BROKEN[which]
    data = json.dumps(found).encode() if isinstance(found, dict) else found
    if data and not data.startswith((b"\xff", b"d\0")):
        data = len(data).to_bytes(8, "little") + data + bytes(8)
    memory.write_block("model", data)

    with pytest.raises(kvio.CorruptBlockError, match="'model' is not in the safetensors format"):
        load(memory, "model")


def test_a_dtype_of_later_is_refused_by_name(memory: kvio.Store) -> None:
    """It is no damage."""
    header = json.dumps({"a": entry(0, 4, [8], "F4")}).encode()
    memory.write_block("model", len(header).to_bytes(8, "little") + header + bytes(4))

    with pytest.raises(kvio.UnsupportedError, match="'a' is F4"):
        load(memory, "model")


@pytest.mark.slow
def test_no_tensor_is_copied() -> None:
    """The peak of memory of a save and of a load stays below an eighth of the tensors."""
    command = [sys.executable, "-m", "tests.recipes.copies", "kvio"]
    ended = subprocess.run(
        command, cwd=snippets.TREE, capture_output=True, text=True, check=True, timeout=200
    )

    saved, loaded = map(int, ended.stdout.split())
    assert saved < NBYTES / 8
    assert loaded < NBYTES / 8
