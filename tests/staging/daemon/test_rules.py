"""What reads see, the order of writes and what absorbs what: as of a tier of one's own."""

from __future__ import annotations

from tests.staging.test_tier import *  # noqa: F403
from tests.staging.test_tier_promises import *  # noqa: F403

del test_a_tier_refuses_in_a_forked_child  # noqa: F821  # it looks inside; test_daemon.py has ours
