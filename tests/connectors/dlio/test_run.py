"""The unmodified dlio_benchmark on kvio: every byte and every count of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvio

from .running import (
    arrays_of,
    expected_states,
    files_below,
    later_release,
    needs_dlio,
    run_dlio,
    saved_states,
    stock_options,
)

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
    """The same workload on local_fs leaves the same files with the same arrays, each of them.

    Where a release draws its samples without a seed, so that two runs of stock differ, the arrays
    have the same names, shapes and types.
    """
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
    if not _equal(ours, theirs):
        run_dlio(root.parent, *stock_options(root.parent / "again"), files)
        assert not _equal(theirs, files_below(root.parent / "again"))
        assert [_shapes(content) for content in ours.values()] == [
            _shapes(content) for content in theirs.values()
        ]


def test_dlios_own_reader_of_hdf5_runs_in_kvios_loader(root: Path) -> None:
    """It closes what it finds among its open files, for each of the samples of a file."""
    pytest.importorskip("h5py", reason="needs h5py")
    run = run_dlio(
        root.parent,
        *stock_options(root.parent / "stock"),
        "++workload.dataset.format=hdf5",
        "++workload.dataset.num_samples_per_file=4",
        "++workload.train.epochs=1",
    )

    assert run.status == 0, run.text


def _equal(some: dict[str, bytes], others: dict[str, bytes]) -> bool:
    return all(
        np.array_equal(array, arrays_of(others[name])[key])
        for name, content in some.items()
        for key, array in arrays_of(content).items()
    )


def _shapes(content: bytes) -> dict[str, tuple[object, ...]]:
    return {name: (array.shape, array.dtype) for name, array in arrays_of(content).items()}


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
        run = run_dlio(root.parent, ranks=2, environment={"KVIO_DLIO": f"posix-tmpfile://{root}"})

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
    assert not [path for path in root.iterdir() if path.name.startswith(".kvio-tmp")]


@pytest.mark.parametrize("name", ["indexed_binary", "mmap_indexed_binary"])
def test_an_indexed_sample_is_a_range_of_a_block(name: str, root: Path) -> None:
    """3 blocks a file are written; an epoch reads 50 samples, and two indexes of each file."""
    run = run_dlio(
        root.parent,
        "+kvio=posix-tmpfile",
        f"kvio.root={root}",
        f"++workload.dataset.format={name}",
        "++workload.dataset.num_files_train=10",
        "++workload.dataset.num_samples_per_file=5",
        "++workload.reader.file_shuffle=seed",
        "++workload.reader.sample_shuffle=seed",
    )

    assert run.status == 0, run.text
    assert run.counts == [(30, 2 * (50 + 10 * 2), 0, 0)]


def test_ranks_share_indexed_files(root: Path) -> None:
    """A rank reads the indexes of the files that it takes samples of, be they another's too."""
    if later_release():
        pytest.skip("this DLIO shares no file between ranks")
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


def test_the_counts_are_printed_at_the_default_log_level(root: Path) -> None:
    """Where DLIO prints its metrics, be its progress hidden or not."""
    run = run_dlio(
        root.parent,
        *("+kvio=posix-tmpfile", f"kvio.root={root}", "++workload.workflow.train=False"),
        environment={"DLIO_LOG_LEVEL": "warning"},
    )

    assert run.status == 0, run.text
    assert run.counts == [(4, 0, 0, 0)]


@pytest.mark.parametrize(("keep", "reads"), [("268435456", 8), ("0", 32)])
def test_shuffled_samples_of_a_block_are_one_read_where_blocks_are_kept(
    keep: str, reads: int, root: Path
) -> None:
    """8 files of 4 samples, one epoch: 8 reads; without a budget nearly every sample is a read."""
    run = run_dlio(
        root.parent,
        *("+kvio=posix-tmpfile", f"kvio.root={root}", f"kvio.keep_bytes={keep}"),
        "++workload.dataset.format=hdf5",
        "++workload.dataset.num_files_train=8",
        "++workload.dataset.num_samples_per_file=4",
        "++workload.reader.sample_shuffle=seed",
        "++workload.train.epochs=1",
    )

    assert run.status == 0, run.text
    [(_, found, _, _)] = run.counts
    assert found == reads if keep != "0" else 16 < found <= reads


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_dataset_has_the_permissions_that_the_umask_leaves(umask: int, root: Path) -> None:
    """Stock DLIO under another user can read it, as it can read files of stock DLIO."""
    run = run_dlio(
        root.parent,
        *("+kvio=posix-tmpfile", f"kvio.root={root}", "++workload.workflow.train=False"),
        umask=umask,
    )

    assert run.status == 0, run.text
    assert _modes(root) == {0o666 & ~umask, 0o777 & ~umask}


def test_permissions_that_are_named_win_over_the_umask(root: Path) -> None:
    """By the names that stores and shared files have; checkpoints get them too."""
    run = run_dlio(
        root.parent,
        *("+kvio=hybrid", f"kvio.root={root}", 'kvio.file_mode="0640"', 'kvio.dir_mode="0750"'),
        *_CHECKPOINTS,
        umask=0o077,
    )

    assert run.status == 0, run.text
    assert run.counts[0][2] > 0
    assert _modes(root) == {0o640, 0o750}


def _modes(root: Path) -> set[int]:
    return {path.stat().st_mode & 0o7777 for path in root.rglob("*") if path.name[0] != "."}


def test_a_layout_that_is_asked_for_is_used(root: Path) -> None:
    """Blocks with trailers, which stock DLIO cannot read, but every store verifies."""
    options = ("+kvio.options.layout=block", "++workload.workflow.train=False")
    run = run_dlio(root.parent, "+kvio=posix-tmpfile", f"kvio.root={root}", *options)

    assert run.status == 0, run.text
    with kvio.open_store(f"posix-tmpfile://{root}?layout=block") as store:
        keys = sorted(store.list_keys("data/"))
        assert len(keys) == 4
        assert all("x" in arrays_of(bytes(store.read_block(key))) for key in keys)


@pytest.mark.parametrize("route", ["KVIO_DLIO", "hydra"])
def test_a_store_in_memory_needs_no_root(route: str, root: Path) -> None:
    """To measure DLIO itself: nothing is written to a disk."""
    if route == "hydra":
        run = run_dlio(root.parent, "+kvio=memory")
    else:
        run = run_dlio(root.parent, environment={"KVIO_DLIO": "memory://"})

    assert run.status == 0, run.text
    assert run.counts == [(4, 8, 0, 0)]


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
        # Later releases leave out files until their number is a multiple of the samples of each.
        "++workload.dataset.num_files_train=6",
        "++workload.dataset.num_files_eval=6",
        "++workload.dataset.num_subfolders_train=2",
        "++workload.dataset.num_subfolders_eval=2",
        "++workload.dataset.num_samples_per_file=3",
        "++workload.reader.sample_shuffle=off",
    )

    assert run.status == 0, run.text
    assert run.counts == [(12, 2 * 6 + 2 * 6, 0, 0)]
    assert len(files_below(root / "data/unet3d/valid/1")) == 3


def test_checkpoints_go_to_a_store_of_their_own(root: Path) -> None:
    """The states of each epoch are blocks of another backend, and can be read back."""
    states = expected_states(checkpoints=2)
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
    assert run.counts == [(4, 8, len(states), 0)]
    saved = files_below(other / "checkpoints/unet3d")
    assert saved_states(saved) == states
    model = arrays_of(next(data for name, data in saved.items() if "model" in name))
    assert list(model) == ["a"]
    assert model["a"].size >= 5000  # later releases save another number of elements


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
    assert _shapes(first.read_bytes()) == _shapes(good)


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
