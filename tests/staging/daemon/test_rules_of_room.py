"""A full tier, a shrunk one, blocks that are too large: as in a tier of one's own."""

from __future__ import annotations

from tests.staging.test_tier_full import *  # noqa: F403
