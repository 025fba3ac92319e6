"""Random games on a daemon's client, as on a tier of one's own, and on a neighbour that reads."""

from __future__ import annotations

import os
import shutil
import tempfile

from hypothesis import settings
from hypothesis.stateful import invariant, rule

import kvio
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.options import TierOptions
from tests.staging.controlled import LONG_S
from tests.staging.test_tier_stateful import CAPACITY, TierMachine, keys


class ClientMachine(TierMachine):
    """The same calls, the same model; a second client must read what the first does."""

    def __init__(self) -> None:
        super().__init__()
        self.tier.close()
        self.directory = tempfile.mkdtemp(prefix="kvd-")
        self.daemon = StageDaemon(
            self.store,
            os.path.join(self.directory, "s"),
            capacity_bytes=CAPACITY,
            options=TierOptions(drain_threads=3, retries=1, high_water=0.8),
        )
        self.tier = kvio.stage(self.store, daemon=self.daemon.path, when_full="raise")
        self.other = kvio.stage(self.store, daemon=self.daemon.path)

    def teardown(self) -> None:
        """End as a tier does, then the daemon: it has nothing left."""
        self.other.stats()  # on the one line it has: what it released before has been handled
        super().teardown()
        self.other.close(timeout=LONG_S)
        self.daemon.close(timeout=LONG_S)
        shutil.rmtree(self.directory)

    @rule(key=keys)
    def read_next_door(self, key: str) -> None:
        """Read a block that the other client wrote."""
        if key in self.model:
            assert bytes(self.other.read_block(key)) in self.model[key]
        else:
            assert not self.other.contains(key)

    @invariant()
    def has_nothing_pinned(self) -> None:
        """Between calls a client holds neither room nor bytes."""
        assert self.daemon.core.ledger.filling == 0


TestClient = ClientMachine.TestCase
TestClient.settings = settings(stateful_step_count=40)
