"""Print the PYTHONPATH for DLIO: ``export PYTHONPATH=$(python -m kvio.connectors.dlio)``."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def paths() -> list[str]:
    """Return the directories of the Hydra plugin and of stubs for libraries not installed."""
    needed = [_HERE / "plugin"]
    for library in ("torch", "tensorflow"):
        spec = importlib.util.find_spec(library)
        if spec is None or "stand_ins" in (spec.origin or ""):
            needed.append(_HERE / "stand_ins" / library)
    return [str(path) for path in needed]


if __name__ == "__main__":
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.stdout.write(os.pathsep.join(dict.fromkeys([*paths(), *given])) + "\n")
