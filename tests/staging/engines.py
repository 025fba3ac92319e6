"""The engine behind a tier, for tests that look inside."""

from __future__ import annotations

from kvio.staging import StagingTier
from kvio.staging.daemon.client import RemoteEngine
from kvio.staging.engine import LocalEngine


def local(tier: StagingTier) -> LocalEngine:
    """Return the engine of a tier in this process."""
    engine = tier._engine
    assert isinstance(engine, LocalEngine)
    return engine


def remote(tier: StagingTier) -> RemoteEngine:
    """Return the engine of a tier in a daemon."""
    engine = tier._engine
    assert isinstance(engine, RemoteEngine)
    return engine
