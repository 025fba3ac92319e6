"""Samples that are damaged, cut or gone, and places without room: the run ends and names them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .running import needs_dlio, run_dlio

pytestmark = [needs_dlio, pytest.mark.slow]

_TRAIN_ONLY = "++workload.workflow.generate_data=False"
_REMOVING = """
import os
from kvio.connectors.dlio.loader import KvioLoader

class RemovingLoader(KvioLoader):
    def next(self):
        if self._passes == 1 and self._args.my_rank == 0:
            os.unlink("store/data/unet3d/train/img_1_of_4.npz")
        yield from super().next()
"""
#: Any value of file_shuffle, off too, has DLIO 2.0.0 shuffle files: it must be absent.
_IN_ORDER = ("~workload.reader.file_shuffle", "++workload.reader.sample_shuffle=off")
#: A .csv has no length and no checksum: what is cut from it are rows.
_FORMATS = ["npz", "npy", "jpeg", "png", "hdf5", "csv", "indexed_binary"]


def _generated(work: Path, name: str) -> tuple[str, ...]:
    from kvio.connectors.dlio import interfaces

    if not interfaces.decodes(name) and name in ("jpeg", "png"):
        pytest.skip("the images that this DLIO generates are noise")
    (work / "store").mkdir()
    options = (
        # One release counts the bytes of a sample, and so does kvio there unless it is told.
        *("+kvio=posix-tmpfile", f"kvio.root={work}/store", "kvio.decode=true"),
        f"++workload.dataset.format={name}",
        f"++workload.dataset.num_samples_per_file={1 if name in ('jpeg', 'png') else 2}",
    )
    run = run_dlio(work, *options, "++workload.workflow.train=False")
    assert run.status == 0, run.text
    return options


@pytest.mark.parametrize("name", _FORMATS)
def test_a_sample_that_is_cut_ends_the_run_with_its_name(name: str, disk_path: Path) -> None:
    """In the middle of an epoch, in every format."""
    options = _generated(disk_path, name)
    sample = disk_path / f"store/data/unet3d/train/img_2_of_4.{name}"
    os.truncate(sample, sample.stat().st_size // 3)
    run = run_dlio(disk_path, *options, _TRAIN_ONLY)

    assert run.status != 0
    assert f"CorruptBlockError: block 'data/unet3d/train/img_2_of_4.{name}'" in run.text, run.text


@pytest.mark.parametrize("name", ["jpeg", "hdf5", "indexed_binary"])
def test_a_sample_of_noise_ends_all_ranks_with_its_name(name: str, disk_path: Path) -> None:
    """It is the second rank's alone; of an indexed sample it is the index."""
    options = _generated(disk_path, name)
    suffix = ".sz.idx" if name == "indexed_binary" else ""
    sample = disk_path / f"store/data/unet3d/train/img_3_of_4.{name}{suffix}"
    sample.write_bytes(b"\xa5" * sample.stat().st_size)
    run = run_dlio(disk_path, *options, *_IN_ORDER, _TRAIN_ONLY, ranks=2)

    assert run.status != 0
    assert f"CorruptBlockError: block 'data/unet3d/train/img_3_of_4.{name}'" in run.text, run.text
    assert "rank 1 failed, all ranks stop" in run.text


@pytest.mark.parametrize(("ranks", "decode"), [(1, "true"), (1, "false"), (2, "true")])
def test_a_block_that_is_gone_in_the_second_epoch_is_named(
    ranks: int, decode: str, disk_path: Path
) -> None:
    """It was there in the first; and what is not decoded is read all the same."""
    (disk_path / "store").mkdir()
    (disk_path / "removing.py").write_text(_REMOVING)
    run = run_dlio(
        disk_path,
        *("+kvio=posix-tmpfile", f"kvio.root={disk_path}/store", *_IN_ORDER),
        f"kvio.decode={decode}",
        "++workload.reader.data_loader_classname=removing.RemovingLoader",
        "++workload.reader.data_loader_sampler=iterative",
        ranks=ranks,
        more_path=str(disk_path),
    )

    assert run.status != 0
    assert "Ending epoch 1" in run.text
    assert "BlockNotFoundError" in run.text
    assert "img_1_of_4.npz" in run.text, run.text


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory with room for little; needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    path = tmp_path / "small"
    path.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=600k,mode=0755", "tmpfs", str(path))
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("this root may not mount")
    yield path
    subprocess.run(("umount", str(path)), check=True)


@pytest.mark.root
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_store_ends_the_run_with_the_block_that_did_not_fit(
    ranks: int, mounted: Path, disk_path: Path
) -> None:
    """And no part of it stands under its name."""
    run = run_dlio(
        disk_path,
        *("+kvio=posix-tmpfile", f"kvio.root={mounted}"),
        "++workload.dataset.record_length=262144",
        "++workload.dataset.record_length_bytes=262144",
        ranks=ranks,
    )

    assert run.status != 0
    # One release draws a progress bar into the lines of an error; 2.0.0 writes a file to be moved.
    assert "No space left on device" in run.text, run.text
    assert "'data/unet3d/train/img_" in run.text
    assert "BufferError" not in run.text
    sizes = {path.stat().st_size for path in mounted.rglob("*.npz")}
    assert len(sizes) == 1
    assert min(sizes) > 262144


@pytest.mark.root
def test_a_full_staging_directory_is_named_and_left_empty(mounted: Path, disk_path: Path) -> None:
    """With the block that was generated, by a generator that writes files in every release."""
    (disk_path / "store").mkdir()
    run = run_dlio(
        disk_path,
        *("+kvio=posix-tmpfile", f"kvio.root={disk_path}/store", f"kvio.staging_dir={mounted}"),
        "++workload.dataset.format=indexed_binary",
        "++workload.dataset.record_length=1048576",
        "++workload.dataset.record_length_bytes=1048576",
        # With less than a sample one release writes nothing, for ever.
        "++workload.dataset.generation_buffer_size=8388608",
    )

    assert run.status != 0
    assert "img_0_of_4.indexed_binary" in run.text, run.text
    assert str(mounted) in run.text
    assert list(mounted.iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["root", "staging_dir"])
def test_a_place_that_cannot_be_written_is_named(
    where: str, ranks: int, mounted: Path, disk_path: Path
) -> None:
    """Before anything is generated."""
    (disk_path / "store").mkdir()
    subprocess.run(("mount", "-o", "remount,ro", str(mounted)), check=True)
    places = {"root": f"{disk_path}/store", where: str(mounted)}
    run = run_dlio(
        disk_path,
        "+kvio=posix-tmpfile",
        *(f"kvio.{name}={path}" for name, path in places.items()),
        ranks=ranks,
    )

    assert run.status != 0
    named = f"'{mounted}'" if where == "staging_dir" else f"{mounted} open>: open read-only"
    assert named in run.text, run.text
    assert "Generating NPZ Data" not in run.text
