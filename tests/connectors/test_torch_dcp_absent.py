"""Without torch the connector raises an error with the package to install."""

from __future__ import annotations

import subprocess
import sys


def test_without_torch_the_import_says_what_to_install() -> None:
    """The connector is a MissingDependencyError where torch is absent, wherever it is imported."""
    code = """
import sys
sys.modules["torch"] = None
import kvio, kvio.connectors
try:
    import kvio.connectors.torch_dcp
except kvio.MissingDependencyError as exc:
    print(exc)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "kvio[torch]" in run.stdout


def test_importing_the_connectors_imports_none() -> None:
    """``kvio.connectors`` loads no connector and no library of one."""
    code = "import sys, kvio.connectors\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "torch" not in run.stdout.split()
    assert "kvio.connectors.torch_dcp" not in run.stdout.split()
