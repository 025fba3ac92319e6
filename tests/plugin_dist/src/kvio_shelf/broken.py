"""Has a mistake of its own: a module of its own distribution is missing."""

from __future__ import annotations

import kvio_shelf.forgotten  # type: ignore[import-not-found]  # on purpose

BrokenBackend = kvio_shelf.forgotten.BrokenBackend
