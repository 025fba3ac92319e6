"""Define the error of this connector."""

from __future__ import annotations

from kvio.errors import KvioError


class PlanError(KvioError):
    """The run did not write or read the blocks that its workload requires."""
