"""The ``kvio`` command; needs the extra ``cli`` (typer and rich)."""

from __future__ import annotations

import sys
from typing import Final

from kvio import __version__

_NEEDS: Final = ("typer", "click", "rich")


def main() -> int:
    """Run the command line of this process and return its exit status."""
    if sys.argv[1:] == ["--version"]:  # avoid the slow imports of the other commands
        sys.stdout.write(f"kvio {__version__}\n")
        return 0
    try:
        from kvio.cli.app import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # outside of a command: while modules are imported, or at its end
        return 130
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in _NEEDS:
            raise
        sys.stderr.write(f"kvio: {exc.name} is missing: pip install 'kvio[cli]'\n")
        return 2
