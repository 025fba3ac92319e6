"""Drains that fail, hang or end out of order: as in a tier of one's own."""

from __future__ import annotations

from tests.staging.test_tier_failures import *  # noqa: F403
