"""``python -m kvio``: the ``kvio`` command."""

from __future__ import annotations

import sys

from kvio.cli import main

if __name__ == "__main__":
    sys.exit(main())
