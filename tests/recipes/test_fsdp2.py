"""docs/recipes/fsdp2.md is true: its program saves and resumes with any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from .running import require, run, write_program

require("torch")
import torch  # noqa: E402

if not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = "docs/recipes/fsdp2.md"
RANK = Path(__file__).with_name("fsdp2_rank.py")


def program(folder: Path) -> Path:
    """Write the page's program beside the test's own; the store is in the same directory."""
    (folder / "ckpt").mkdir()
    (folder / RANK.name).write_text(RANK.read_text(encoding="utf-8"), encoding="utf-8")
    return write_program(PAGE, folder, name="train.py", instead={"/mnt/ckpt": f"{folder}/ckpt"})


def test_the_program_goes_on_where_it_was_with_any_number_of_ranks(real_disk: Path) -> None:
    """Two ranks train, then one goes on."""
    train = program(real_disk)

    printed = [run(train, ranks=ranks) for ranks in (2, 1)]

    assert printed == [["2 ranks begin after step 0"], ["1 ranks begin after step 3"]]


@pytest.mark.parametrize("where", ["files", "bucket"])
def test_every_bit_comes_back_with_another_number_of_ranks(
    where: str, real_disk: Path, request: pytest.FixtureRequest
) -> None:
    """Parameters and the optimizer's state, saved by 2 ranks, loaded by 1, and the other way."""
    program(real_disk)
    env: Mapping[str, str] = {}
    if where == "bucket":
        pytest.importorskip("obstore", reason="obstore is not installed")
        bucket = request.getfixturevalue("bucket")
        given: Mapping[str, str] = request.getfixturevalue("s3_env")
        env = {**given, "STORE": f"s3://{bucket}/ckpt?durability=durable"}

    for before, after, ranks in ((0, 3, 2), (3, 4, 1), (4, 5, 2)):
        done = run(real_disk / RANK.name, str(before), str(after), ranks=ranks, env=env)
        assert done == [f"rank {rank} done" for rank in range(ranks)]
