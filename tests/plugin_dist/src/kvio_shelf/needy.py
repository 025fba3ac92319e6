"""Needs a library that is not there."""

from __future__ import annotations

import no_such_library


class NeedyBackend(no_such_library.Backend):  # type: ignore[misc]  # never gets here
    """Never made."""
