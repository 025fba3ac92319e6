"""What a store is told, so that it works as the library does by hand."""

from __future__ import annotations

import math
from typing import Any


def signing(library: str, *, unsigned: bool) -> dict[str, Any]:
    """Give the options of a store whose bodies are not hashed, where the library has the choice."""
    return {"payload_signing": "unsigned"} if unsigned and library not in ("minio", "torch") else {}


def as_by_hand(part_bytes: int) -> dict[str, Any]:
    """No checksum, one request an object, no deadline but the library's own."""
    return {"checksum": "none", "part_bytes": part_bytes, "request_timeout_s": math.inf}
