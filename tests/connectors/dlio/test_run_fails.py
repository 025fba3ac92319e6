"""What must not pass in silence: DLIO ignores what it cannot find, kvio does not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from .running import files_below, needs_dlio, run_dlio, stock_options

pytestmark = [needs_dlio, pytest.mark.slow]

_TRAIN_ONLY = "++workload.workflow.generate_data=False"

_IDLE = """
from kvio.connectors.dlio.loader import KvioLoader

class IdleLoader(KvioLoader):
    def _load(self, filename, read):
        return len(read.samples)
"""


@pytest.fixture
def root(disk_path: Path) -> Path:
    """Return a directory for blocks."""
    path = disk_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def generated(root: Path) -> Path:
    """Return a store with a dataset."""
    run = run_dlio(
        root.parent, "+kvio=posix-tmpfile", f"kvio.root={root}", "++workload.workflow.train=False"
    )
    assert run.status == 0, run.text
    return root


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["+kvio=posix-tmpfil"], "posix-tmpfile"),
        (["+kvio=posix-tmpfile"], "kvio.root=DIRECTORY"),
        (["+kvio=posix-tmpfile", "kvio.root={root}/none"], "none' does not exist"),
        (["+kvio=posix-tmpfile", "kvio.root={root}", "+kvio.rot=1"], "unknown settings rot"),
        (
            ["+kvio=posix-tmpfile", "kvio.root={root}", "+kvio.options.durabilty=1"],
            "did you mean 'durability'",
        ),
        (
            ["+kvio=posix-tmpfile", "kvio.root={root}", "kvio.staging_dir=/nowhere"],
            "cannot create a staging directory in '/nowhere'",
        ),
        (
            ["+kvio=posix-tmpfile", "kvio.root={root}", "++workload.dataset.data_folder=../data"],
            "goes up with '..'",
        ),
        (
            ["+kvio=posix-tmpfile", "kvio.root={root}", "++workload.dataset.format=synthetic"],
            "not synthetic; kvio.decode=false",
        ),
        (
            ["+kvio=posix-tmpfile", "kvio.root={root}", "++workload.reader.read_threads=5"],
            "read_threads=5, but a rank has 4 samples",
        ),
    ],
)
def test_a_run_that_cannot_be_ends_with_a_sentence(
    options: Sequence[str], said: str, root: Path
) -> None:
    """Whatever is wrong is said, and the command fails."""
    run = run_dlio(root.parent, *(option.format(root=root) for option in options))

    assert run.status != 0
    assert said in run.text, run.text
    assert "[METRIC]" not in run.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "not a store URL"),
        ("3", "no backend is named '3'"),
        ("{}", "'data', the URL of a store, is needed"),
        ('{"data": []}', "'data' must be text"),
        ('{"data": "posix-tmpfile:///nowhere"}', "'/nowhere' does not exist"),
        ("", "'ERROR: Incorrect Format Type'"),
    ],
)
def test_settings_in_the_environment_that_cannot_be_end_the_run(
    text: str, said: str, tmp_path: Path
) -> None:
    """With kvio's sentence; where the variable is empty nothing is kvio's, and DLIO refuses."""
    storage = "++workload.storage.storage_type=parallel_fs"
    run = run_dlio(tmp_path, storage, environment={"KVIO_DLIO": text})

    assert run.status != 0
    assert said in run.text, run.text
    assert "Starting data generation" not in run.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dlio_with_another_interface_is_refused(ranks: int, root: Path) -> None:
    """A factory that takes other arguments than in the releases that kvio knows."""
    named = root.parent / "first"
    named.mkdir()
    (named / "sitecustomize.py").write_text(
        "from dlio_benchmark.storage.storage_factory import StorageFactory\n"
        "StorageFactory.get_storage = staticmethod(lambda kind, place: None)\n"
    )
    run = run_dlio(
        root.parent,
        *("+kvio=posix-tmpfile", f"kvio.root={root}"),
        ranks=ranks,
        more_path=str(named),
    )

    assert run.status != 0
    said = "kvio does not know this DLIO: StorageFactory.get_storage takes (kind, place)"
    assert said in run.text, run.text
    assert files_below(root) == {}


def test_a_class_that_dlio_does_not_find_fails_the_run(generated: Path) -> None:
    """DLIO goes on without it, and would read paths instead of blocks."""
    run = run_dlio(
        generated.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={generated}",
        _TRAIN_ONLY,
        "++workload.reader.reader_classname=kvio.connectors.dlio.readers.NoReader",
    )

    assert run.status != 0
    assert "did not find reader_classname=kvio.connectors.dlio.readers.NoReader" in run.text


def test_a_reader_that_goes_around_kvio_fails_the_run(generated: Path) -> None:
    """DLIO's own opens paths: not one block would be read."""
    run = run_dlio(
        generated.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={generated}",
        _TRAIN_ONLY,
        "++workload.reader.reader_classname=null",
    )

    assert run.status != 0
    assert "the reader is not kvio's" in run.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_read_too_little_fails_on_all_ranks(ranks: int, generated: Path) -> None:
    """A loader that hands on batches without reading is found out at the end."""
    (generated.parent / "idle.py").write_text(_IDLE)
    run = run_dlio(
        generated.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={generated}",
        _TRAIN_ONLY,
        "++workload.reader.data_loader_classname=idle.IdleLoader",
        "++workload.reader.data_loader_sampler=iterative",
        ranks=ranks,
        more_path=str(generated.parent),
    )

    assert run.status != 0
    assert f"rank {ranks - 1} read 0 samples of {8 // ranks}" in run.text, run.text


def test_a_storage_type_that_is_not_kvios_is_warned_of(root: Path) -> None:
    """The run is DLIO's own then, and says so."""
    run = run_dlio(
        root.parent,
        *stock_options(root.parent / "data"),
        "++workload.storage.storage_type=local_fs",
        environment={"KVIO_DLIO": f"posix-tmpfile://{root}"},
    )

    assert run.status == 0, run.text
    assert "[KVIO] warning: kvio is configured, but storage_type is local_fs" in run.text
    assert files_below(root) == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_corrupt_sample_stops_all_ranks_with_its_name(ranks: int, generated: Path) -> None:
    """Nothing waits in a barrier for a rank that has failed."""
    sample = generated / "data/unet3d/train/img_2_of_4.npz"
    os.truncate(sample, 1000)
    where = ("+kvio=posix-tmpfile", f"kvio.root={generated}", "kvio.decode=true", _TRAIN_ONLY)
    run = run_dlio(generated.parent, *where, ranks=ranks)

    assert run.status != 0
    assert "block 'data/unet3d/train/img_2_of_4.npz' is no npz sample" in run.text, run.text


def test_a_sample_that_cannot_be_read_is_named(generated: Path) -> None:
    """The error of the backend ends the run, with the block's name."""
    sample = generated / "data/unet3d/train/img_1_of_4.npz"
    sample.unlink()
    sample.symlink_to("/nowhere")
    run = run_dlio(generated.parent, "+kvio=posix-tmpfile", f"kvio.root={generated}", _TRAIN_ONLY)

    assert run.status != 0
    assert "img_1_of_4.npz" in run.text or "Not enough training dataset" in run.text, run.text


def test_a_block_that_cannot_be_written_is_named(root: Path) -> None:
    """A directory stands where a sample should be: generation stops there."""
    (root / "data/unet3d/train/img_1_of_4.npz/x").mkdir(parents=True)
    run = run_dlio(root.parent, "+kvio=posix-tmpfile", f"kvio.root={root}")

    assert run.status != 0
    assert "for block 'data/unet3d/train/img_1_of_4.npz'" in run.text, run.text


def test_a_failed_run_leaves_no_staging_directory(root: Path, tmp_path: Path) -> None:
    """What generators staged is gone, whatever became of it."""
    (root / "data/unet3d/train/img_1_of_4.npz/x").mkdir(parents=True)
    run = run_dlio(
        root.parent, "+kvio=posix-tmpfile", f"kvio.root={root}", f"kvio.staging_dir={tmp_path}"
    )

    assert run.status != 0
    assert list(tmp_path.iterdir()) == []
