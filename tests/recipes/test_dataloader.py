"""docs/recipes/dataloader.md is true: which stores work in which workers, and its program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import kvio
from tests import snippets
from tests.s3.libraries import require as require_library

from .running import require, run, write_program

require("torch")
import torch  # noqa: E402

from .samples import Samples  # noqa: E402

pytestmark = [
    *(pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)),
    # Python 3.12 warns of every fork beside threads, which pytest has.
    pytest.mark.filterwarnings("ignore"),
]

PAGE = "docs/recipes/dataloader.md"
KEYS = [f"samples/{number}" for number in range(6)]
METHODS = ("fork", "spawn")


def table() -> dict[str, tuple[bool, bool]]:
    """Read the page's table: for each backend, whether forked and spawned workers can read."""
    text = (snippets.TREE / PAGE).read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([\w+-]+)` \| (yes|no)\b[^|]*\| (yes|no)\b[^|]*\|$", text, re.MULTILINE
    )
    return {backend: (fork == "yes", spawn == "yes") for backend, fork, spawn in rows}


TABLE = table()


def test_the_table_has_every_backend() -> None:
    """A new backend needs a row."""
    assert set(TABLE) == set(kvio.backend_names()) - {"s3"}


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kvio.Store]:
    """Yield a store of a backend, with samples; S3 credentials are in the environment."""
    backend = request.param
    if backend == "memory":
        opened = kvio.open_store(backend)
    elif backend.startswith("s3+"):
        require_library(backend)
        variables: Mapping[str, str] = request.getfixturevalue("s3_env")
        bucket = request.getfixturevalue("bucket")
        patch = request.getfixturevalue("monkeypatch")
        for name, value in variables.items():
            patch.setenv(name, value)
        opened = kvio.open_store(f"{backend}://{bucket}/data")
    else:
        opened = kvio.open_store(backend, root=tmp_path)
    with opened:
        for number, key in enumerate(KEYS):
            opened.write_block(key, torch.full((4,), float(number)))
        opened.read_block(KEYS[0])  # connections and threads are there before the fork
        yield opened


def read_all(store: Any, method: str) -> list[float]:
    """Read every sample in two workers."""
    loader: Any = torch.utils.data.DataLoader(
        Samples(store, KEYS),
        batch_size=3,
        num_workers=2,
        multiprocessing_context=method,
        timeout=200,
    )
    return [float(number) for batch in loader for number in batch[:, 3]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("store", TABLE, indirect=True)
def test_the_table_is_true(store: kvio.Store, method: str, request: pytest.FixtureRequest) -> None:
    """Workers read every sample, or the first read is refused at once; the parent goes on."""
    backend = request.node.callspec.params["store"]
    works = TABLE[backend][METHODS.index(method)]

    if works:
        assert read_all(store, method) == [0, 1, 2, 3, 4, 5]
    else:
        with pytest.raises(kvio.UnsupportedError):
            read_all(store, method)
    if method == "fork":
        assert store.capabilities.usable_after_fork is works

    assert len(store.read_block(KEYS[5])) == 16


@pytest.mark.parametrize("method", METHODS)
def test_a_tier_is_in_no_worker(method: str, tmp_path: Path) -> None:
    """It is refused, whichever way workers start."""
    with kvio.open_store(tmp_path) as behind, kvio.stage(behind, "16MiB") as tier:
        for key in KEYS:
            tier.write_block(key, torch.ones(4))
        with pytest.raises((kvio.KvioError, TypeError)):
            read_all(tier, method)


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_an_error_in_a_worker_names_the_block(damage: str, tmp_path: Path) -> None:
    """It has the class that it has in the worker."""
    with kvio.open_store("posix-tmpfile", root=tmp_path) as opened:
        for key in KEYS:
            opened.write_block(key, torch.ones(4))
        if damage == "missing":
            opened.delete_block(KEYS[4])
        else:
            path = next(p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size == 80)
            data = bytearray(path.read_bytes())
            data[0] ^= 1
            path.write_bytes(data)
        error = kvio.BlockNotFoundError if damage == "missing" else kvio.CorruptBlockError
        with pytest.raises(error, match=r"worker process[\s\S]*samples/\d"):
            read_all(opened, "fork")


@pytest.mark.parametrize("method", METHODS)
def test_the_program_of_the_page_runs(method: str, real_disk: Path) -> None:
    """It prints what the page's samples add up to."""
    (real_disk / "kv").mkdir()
    program = write_program(PAGE, real_disk, name="load.py", instead={"/mnt/kv": f"{real_disk}/kv"})

    printed = run(program, env={"METHOD": method})

    assert printed == [f"{method}: the first numbers of 64 samples add up to 2016"]
