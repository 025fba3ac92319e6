"""docs/recipes/huggingface.md is true: checkpoints of Accelerate and the Trainer go to a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import snippets

from .running import ENVIRONMENT, require

require("torch", "accelerate", "transformers")

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = "docs/recipes/huggingface.md"
#: What is appended to each program, in the page's order: it must end with a line "true".
CHECKS = (
    """
import shutil
saved = [parameter.detach().clone() for parameter in model.parameters()]
shutil.rmtree("out"), shutil.rmtree("fetched")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
optimizer.state_dict()["state"][0]["exp_avg"].zero_()
with kvio.open_store("hybrid:///mnt/ckpt?durability=durable") as store:
    load_directory(store, "run-7/step-1", "fetched/step-1")
accelerator.load_state("fetched/step-1")
assert all(map(torch.equal, saved, model.parameters()))
assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments)
print("true")
""",
    """
import os
saved = [parameter.detach().clone() for parameter in model.parameters()]
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
with kvio.open_store("hybrid:///mnt/ckpt?durability=durable") as store:
    assert sorted(store.list_keys()) == ["out/step-2/model-0"]
    accelerator.load_state("out/step-2")
assert all(map(torch.equal, saved, model.parameters()))
assert not [name for name in os.listdir("out/step-2") if "model" in name], os.listdir("out/step-2")
print("true")
""",
    """
import shutil
with kvio.open_store("memory") as other:
    UploadCheckpoints.on_save = lambda *arguments, **others: None
    whole = trainer(other, "out-3", 6)
    whole.train()
assert resumed.state.global_step == 6
for name, tensor in whole.model.state_dict().items():
    assert torch.equal(resumed.model.state_dict()[name], tensor), name
with kvio.open_store("hybrid:///mnt/ckpt?durability=durable") as store:
    assert saved_directories(store) == ["run-7/00000004", "run-7/00000006"]
print("true")
""",
)
SNIPPETS = snippets.snippets(PAGE)


@pytest.mark.parametrize(
    ("snippet", "check"), list(zip(SNIPPETS, CHECKS, strict=True)), ids=map(str, SNIPPETS)
)
def test_a_program_of_the_page_runs(snippet: snippets.Snippet, check: str, real_disk: Path) -> None:
    """As it stands; then what it loaded is compared bit for bit with what was saved."""
    (real_disk / "ckpt").mkdir()
    program = real_disk / "program.py"
    code = (snippet.code + check).replace("/mnt/ckpt", f"{real_disk}/ckpt")
    program.write_text(code, encoding="utf-8")

    ended = subprocess.run(
        [sys.executable, str(program)],
        cwd=real_disk,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )

    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "true"
