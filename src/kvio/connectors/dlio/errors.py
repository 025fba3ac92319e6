"""The one error of this connector that is not kvio's."""

from __future__ import annotations

from kvio.errors import KvioError


class PlanError(KvioError):
    """The run did not write or read what its workload says."""
