"""DLIO's own workloads of TFRecord files, with TensorFlow where it is installed and without."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from .running import files_below, needs_dlio, run_dlio

pytestmark = [needs_dlio, pytest.mark.slow]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_workload_of_records_is_generated_and_read(ranks: int, disk_path: Path) -> None:
    """As it is, framework and loader TensorFlow's: every record of it is framed and counted."""
    root = disk_path / "store"
    root.mkdir()
    run = run_dlio(
        disk_path,
        "workload=resnet50_a100",
        "+kvio=posix-tmpfile",
        f"kvio.root={root}",
        "++workload.dataset.num_samples_per_file=2",
        ranks=ranks,
    )

    assert run.status == 0, run.text
    assert run.counts == [(4 // ranks, 8 // ranks, 0, 0)] * ranks
    stored = files_below(root)
    assert sorted(stored) == [f"data/resnet50/train/img_{i}_of_4.tfrecord" for i in range(4)]
    for content in stored.values():
        [nbytes] = struct.unpack_from("<Q", content)
        assert len(content) == 2 * (8 + 4 + nbytes + 4)
    assert sorted(path.name for path in disk_path.iterdir()) == ["out", "store"]


def test_a_record_that_is_damaged_stops_the_run_with_its_name(disk_path: Path) -> None:
    """One bit of one record."""
    root = disk_path / "store"
    root.mkdir()
    where = ("workload=resnet50_a100", "+kvio=posix-tmpfile", f"kvio.root={root}")
    options = (*where, "++workload.dataset.num_samples_per_file=2")
    run_dlio(disk_path, *options, "++workload.workflow.train=False")
    sample = root / "data/resnet50/train/img_2_of_4.tfrecord"
    content = bytearray(sample.read_bytes())
    content[len(content) // 2] ^= 4
    sample.write_bytes(content)
    run = run_dlio(disk_path, *options, "++workload.workflow.generate_data=False")

    assert run.status != 0
    assert "block 'data/resnet50/train/img_2_of_4.tfrecord' is no tfrecord sample" in run.text
