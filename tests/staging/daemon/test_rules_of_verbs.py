"""The verbs that a tier has in common with a store: as in a tier of one's own."""

from __future__ import annotations

from tests.staging.test_tier_verbs import *  # noqa: F403
