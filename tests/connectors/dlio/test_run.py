"""The unmodified dlio_benchmark on kvio: every byte and every count of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .running import arrays_of, files_below, needs_dlio, run_dlio, stock_options

pytestmark = [needs_dlio, pytest.mark.slow]

_CHECKPOINTS = (
    "++workload.workflow.checkpoint=True",
    "++workload.checkpoint.checkpoint_after_epoch=1",
    "++workload.checkpoint.epochs_between_checkpoints=1",
    "++workload.checkpoint.model_size=5000",
    "++workload.checkpoint.layer_parameters=[1000,2000]",
)
_METRICS = [
    "Number of Simulated Accelerators",
    "Training Accelerator Utilization [AU] (%)",
    "Training Throughput (samples/second)",
    "Training I/O Throughput (MB/second)",
]


@pytest.fixture
def root(disk_path: Path) -> Path:
    """Return a directory for blocks."""
    path = disk_path / "store"
    path.mkdir()
    return path


@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct", "hybrid"])
def test_a_run_writes_every_sample_and_reads_each_once_an_epoch(backend: str, root: Path) -> None:
    """4 samples, 2 epochs: 4 writes and 8 reads, exactly, and DLIO's own metrics."""
    run = run_dlio(root.parent, f"+kvio={backend}", f"kvio.root={root}")

    assert run.status == 0, run.text
    assert run.counts == [(4, 8, 0, 0)]
    assert run.metrics == _METRICS
    stored = files_below(root)
    assert sorted(stored) == [f"data/unet3d/train/img_{i}_of_4.npz" for i in range(4)]
    assert all(arrays_of(content)["x"].shape == (64, 64, 1) for content in stored.values())


def test_stored_samples_are_those_that_stock_dlio_generates(root: Path) -> None:
    """The same workload on local_fs leaves the same files with the same arrays, each of them."""
    files = "++workload.dataset.num_files_train=9"
    where = ("+kvio=posix-direct", f"kvio.root={root}")
    run = run_dlio(root.parent, *where, files, "++workload.workflow.train=False")
    stock = run_dlio(root.parent, *stock_options(root.parent / "stock"), files)

    assert (run.status, stock.status) == (0, 0), stock.text
    assert stock.metrics == _METRICS
    ours = files_below(root / "data/unet3d")
    theirs = files_below(root.parent / "stock")
    assert list(ours) == list(theirs)
    assert len(ours) == 9
    for name, content in ours.items():
        mine, other = arrays_of(content), arrays_of(theirs[name])
        assert all(np.array_equal(mine[key], other[key]) for key in ("x", "y"))


@pytest.mark.parametrize(("batch", "steps"), [(1, 4), (3, 1)])
def test_an_epoch_has_every_step_that_dlio_expects(batch: int, steps: int, root: Path) -> None:
    """Samples that fill no batch are left, as DLIO's own loader leaves them."""
    run = run_dlio(
        root.parent,
        *("+kvio=posix-tmpfile", f"kvio.root={root}"),
        f"++workload.reader.batch_size={batch}",
    )

    assert run.status == 0, run.text
    assert run.counts == [(4, 2 * steps * batch, 0, 0)]
    assert run.text.count(f"processed {batch} samples in") == 2 * steps


@pytest.mark.parametrize("route", ["KVIO_DLIO", "hydra"])
def test_ranks_share_the_work(route: str, root: Path) -> None:
    """Two ranks write half of the samples each and read half of them each epoch."""
    if route == "hydra":
        run = run_dlio(root.parent, "+kvio=posix-tmpfile", f"kvio.root={root}", ranks=2)
    else:
        storage = "++workload.storage.storage_type=parallel_fs"
        run = run_dlio(
            root.parent, storage, ranks=2, environment={"KVIO_DLIO": f"posix-tmpfile://{root}"}
        )

    assert run.status == 0, run.text
    assert run.counts == [(2, 4, 0, 0), (2, 4, 0, 0)]


@pytest.mark.parametrize("name", ["npy", "jpeg", "png", "hdf5", "csv"])
def test_every_format_is_written_and_read(name: str, root: Path) -> None:
    """What DLIO generates in a format is stored, read and decoded."""
    run = run_dlio(
        root.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={root}",
        f"++workload.dataset.format={name}",
    )

    assert run.status == 0, run.text
    assert run.counts == [(4, 8, 0, 0)]
    assert all(path.endswith(f".{name}") for path in files_below(root))


@pytest.mark.parametrize("name", ["indexed_binary", "mmap_indexed_binary"])
def test_an_indexed_sample_is_a_range_of_a_block(name: str, root: Path) -> None:
    """3 blocks a file are written; an epoch reads 20 samples, and two indexes of each file."""
    run = run_dlio(
        root.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={root}",
        f"++workload.dataset.format={name}",
        "++workload.dataset.num_samples_per_file=5",
        "++workload.reader.file_shuffle=seed",
        "++workload.reader.sample_shuffle=seed",
    )

    assert run.status == 0, run.text
    assert run.counts == [(12, 2 * (20 + 4 * 2), 0, 0)]


def test_ranks_share_indexed_files(root: Path) -> None:
    """A rank reads the indexes of the files that it takes samples of, be they another's too."""
    run = run_dlio(
        root.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={root}",
        "++workload.dataset.format=indexed_binary",
        "++workload.dataset.num_files_train=3",
        "++workload.dataset.num_samples_per_file=4",
        "++workload.reader.sample_shuffle=off",
        ranks=2,
    )

    assert run.status == 0, run.text
    assert [one[1] for one in run.counts] == [2 * (6 + 2 * 2)] * 2


def test_what_is_not_decoded_is_read_all_the_same(root: Path) -> None:
    """``kvio.decode=false`` counts the same blocks, of which nothing is made."""
    run = run_dlio(root.parent, "+kvio=posix-tmpfile", f"kvio.root={root}", "kvio.decode=false")

    assert run.status == 0, run.text
    assert run.counts == [(4, 8, 0, 0)]


def test_subfolders_samples_evaluation_and_shuffling_keep_the_counts_exact(root: Path) -> None:
    """Several samples a file, folders, evaluations and a shuffled order, all at once."""
    run = run_dlio(
        root.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={root}",
        "++workload.workflow.evaluation=True",
        "++workload.dataset.num_files_eval=2",
        "++workload.dataset.num_subfolders_train=2",
        "++workload.dataset.num_subfolders_eval=2",
        "++workload.dataset.num_samples_per_file=3",
        "++workload.reader.sample_shuffle=off",
    )

    assert run.status == 0, run.text
    assert run.counts == [(6, 2 * 4 + 2 * 2, 0, 0)]
    assert len(files_below(root / "data/unet3d/valid/1")) == 1


def test_checkpoints_go_to_a_store_of_their_own(root: Path) -> None:
    """Model and layers of each epoch are blocks of another backend, and can be read back."""
    other = root.parent / "checkpoints"
    other.mkdir()
    run = run_dlio(
        root.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={root}",
        f'kvio.checkpoint="posix-direct://{other}?durability=durable"',
        *_CHECKPOINTS,
    )

    assert run.status == 0, run.text
    assert run.counts == [(4, 8, 4, 0)]
    saved = files_below(other / "checkpoints/unet3d")
    assert sorted(saved) == [
        f"{state}-{epoch}-4-0.npz" for state in ("layer-0", "model") for epoch in (1, 2)
    ]
    model = arrays_of(saved["model-1-4-0.npz"])
    assert {name: array.size for name, array in model.items()} == {"a": 5000}


def test_a_second_generation_replaces_the_first(root: Path) -> None:
    """A dataset of other samples of the same names and lengths is not kept."""
    where = ("+kvio=posix-tmpfile", f"kvio.root={root}", "++workload.workflow.train=False")
    run_dlio(root.parent, *where)
    [first, *_] = sorted(root.rglob("*.npz"))
    good = first.read_bytes()
    first.write_bytes(bytes(len(good)))
    run = run_dlio(root.parent, *where)

    assert run.status == 0, run.text
    assert first.stat().st_size == len(good)
    assert np.array_equal(arrays_of(first.read_bytes())["x"], arrays_of(good)["x"])


def test_files_that_are_not_kept_are_deleted(root: Path) -> None:
    """``keep_files: False`` leaves no block."""
    run = run_dlio(
        root.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={root}",
        "++workload.dataset.keep_files=False",
    )

    assert run.status == 0, run.text
    assert run.counts == [(4, 8, 0, 0)]
    assert files_below(root) == {}
