"""Every block of Python in the README and in docs/ runs when it is pasted into a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import snippets
from tests.sharedfile import launching
from tests.sharedfile.kills import sidecar_of
from tests.snippets import Snippet

#: Pages whose blocks need a server, a daemon or torch, and the tests that run them with it.
ELSEWHERE = {
    "docs/connectors/torch_dcp.md": "tests/connectors/test_torch_dcp_docs.py",
    "docs/recipes/dataloader.md": "tests/recipes/test_dataloader.py",
    "docs/recipes/fsdp2.md": "tests/recipes/test_fsdp2.py",
    "docs/recipes/huggingface.md": "tests/recipes/test_huggingface.py",
    "docs/recipes/lightning.md": "tests/recipes/test_lightning.py",
    "docs/recipes/safetensors.md": "tests/recipes/test_safetensors.py",
    "docs/recipes/torchtitan.md": "tests/recipes/test_torchtitan.py",
    "docs/s3.md": "tests/s3/test_s3_docs.py",
    "docs/staging-daemon.md": "tests/staging/daemon/test_page.py",
}
HERE = [one for page in snippets.PAGES if page not in ELSEWHERE for one in snippets.snippets(page)]


@pytest.mark.slow
@pytest.mark.parametrize("snippet", HERE, ids=str)
def test_a_snippet_runs(snippet: Snippet, real_disk: Path) -> None:
    """On a disk, as some ask for durable blocks; no temporary is left."""
    before = launching.mpirun(2) if "mpi4py" in snippet.code else ()
    snippets.run(snippet, real_disk, before=before)

    hidden = {path.name for path in real_disk.iterdir() if path.name.startswith(".")}
    kept = {sidecar_of(path).name for path in real_disk.iterdir() if path.is_file()}
    assert hidden <= kept


def test_no_page_is_forgotten() -> None:
    """What does not run here runs in the test that is named."""
    assert len(HERE) >= 15
    for page, test in ELSEWHERE.items():
        assert page in snippets.PAGES
        assert f'"{page}"' in (snippets.TREE / test).read_text(encoding="utf-8")


def test_a_name_that_is_not_defined_is_noticed(tmp_path: Path) -> None:
    """As 9 of 19 blocks had one."""
    with pytest.raises(AssertionError, match="NameError: name 'store' is not defined"):
        snippets.run(Snippet("a page", 1, "store.close()\n"), tmp_path)
