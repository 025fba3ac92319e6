"""Every S3 backend keeps the contract of a store, against a real server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import pytest

import kvio
from kvio import MiB
from kvio.testing.suite import BackendTests
from tests.s3.gaps import known_gap
from tests.s3.libraries import LIBRARIES, open_s3
from tests.s3.rawsig import RawS3
from tests.s3.servers import Endpoint

#: What a server may be known to lack, by the test that needs it.
_PROPERTIES = {"test_a_key_below_another_key": "nested-keys"}


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("library", LIBRARIES)
class TestS3(BackendTests):
    """Blocks in a bucket keep the contract, through every library and in both layouts."""

    large_sizes: ClassVar[Sequence[int]] = (1 * MiB + 1, 5 * MiB, 13 * MiB + 77)
    rounds: ClassVar[int] = 4

    @pytest.fixture(autouse=True)
    def _choose(
        self,
        library: str,
        layout: Literal["block", "plain"],
        s3_endpoint: Endpoint,
        s3_bucket: str,
        raw_s3: RawS3,
        monkeypatch: pytest.MonkeyPatch,
        request: pytest.FixtureRequest,
    ) -> None:
        gap = known_gap(s3_endpoint.name, _PROPERTIES.get(request.node.originalname, ""))
        if gap is not None:
            request.applymarker(pytest.mark.xfail(reason=gap, strict=True))
        self.library, self.layout = library, layout
        self.endpoint, self.bucket, self.raw = s3_endpoint, s3_bucket, raw_s3
        # A pickled store leaves its credentials behind.
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_endpoint.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_endpoint.secret_key)

    def open(self, tmp_path: Path) -> kvio.Store:
        """Open a store in a prefix that is named as the test's directory."""
        return open_s3(
            self.library,
            self.endpoint,
            self.bucket,
            prefix=tmp_path.name.replace("[", "_").strip("]"),
            layout=self.layout,
            options={"part_bytes": 5 * MiB},
        )

    def test_the_time_of_a_block_is_what_the_server_says(self, tmp_path: Path) -> None:
        """In the same request as the rest: `kvio ls -l` shows it."""
        began = time.time()
        with self.open(tmp_path) as store:
            store.write_block("block", b"x")
            mtime_ns = store.stat_block("block").mtime_ns

        assert mtime_ns is not None
        # Servers keep whole seconds, and a clock of their own.
        assert began - 5 <= mtime_ns / 1e9 <= time.time() + 5

    def _name(self, store: kvio.Store, key: str) -> str:
        return f"{store.url.path.strip('/')}/{key}"

    def raw_get(self, store: kvio.Store, key: str) -> bytes | None:
        """Fetch a payload by a client of our own."""
        stored = self.raw.get(self.bucket, self._name(store, key))
        if stored is None or self.layout == "plain":
            return stored
        return stored[:-64]

    def raw_stored(self, store: kvio.Store, key: str) -> bytes:
        """Fetch an object."""
        stored = self.raw.get(self.bucket, self._name(store, key))
        assert stored is not None
        return stored

    def raw_put(self, store: kvio.Store, key: str, stored: bytes) -> None:
        """Put other bytes under an object's name."""
        self.raw.put(self.bucket, self._name(store, key), stored)

    def raw_leftovers(self, _: kvio.Store) -> list[str]:
        """List objects that are no blocks."""
        return [name for name in self.raw.list_keys(self.bucket) if "/.kvio-" in name]
