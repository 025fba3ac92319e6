"""The kvio command without its installation: a daemon for tests, run by ``python -m``."""

from __future__ import annotations

import sys

from kvio.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["stage-daemon", *sys.argv[1:]]))
