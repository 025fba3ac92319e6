"""``python -m benchmarks NAME``: see `benchmarks.cli`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; say what to install where that is missing."""
    try:
        from benchmarks.cli import app
        from kvio.cli.app import run
    except ImportError as exc:
        if exc.name not in ("typer", "rich", "kvio"):
            raise
        sys.stderr.write(f"python -m benchmarks: needs {exc.name}: pip install '.[cli,plot]'\n")
        return 2
    return run(sys.argv[1:], app, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main())
