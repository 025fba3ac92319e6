"""Lookups and deletions: stat, contains, listing, prefix counts."""

from __future__ import annotations

import time

import pytest

import kvio
from kvio.testing.hooks import StoreTests
from kvio.testing.payloads import payload

#: Keys that careless naming would map onto each other.
_DISTINCT = (
    *("a", "A", "a.b", "a-b", "a_b", "a=b", "a@b", "a+b", "_a", "0a", "a..b", "a.", "a-"),
    *("d/a", "d/A", "D/a2", "d/e/a", "d/e.a", "d_e/a", "da"),
)
_LISTED = ("a1", "b/1", "b/2", "b/c/1", "b2/1", "bb", "tmp", "kvio-tmp-1", "x.tmp")


class LookingTests(StoreTests):
    """The promises of `stat_block`, `contains`, `list_keys`, `count_leading` and deletion."""

    def test_stat_describes_the_block(self, store: kvio.Store) -> None:
        """A stat has the payload's length, the stored length, and a time in the past."""
        for nbytes in (0, 1, 4096, 70_000):
            store.write_block(f"block/{nbytes}", payload(nbytes))

            stat = store.stat_block(f"block/{nbytes}")

            assert (stat.key, stat.nbytes) == (f"block/{nbytes}", nbytes)
            assert stat.stored_nbytes >= nbytes
            assert stat.mtime_ns is None or 0 < stat.mtime_ns <= time.time_ns() + 10**9

    def test_contains_tells_what_is_there(self, store: kvio.Store) -> None:
        """A block is contained from its write to its deletion; a prefix of a key is not."""
        assert not store.contains("dir/block")

        store.write_block("dir/block", b"")

        assert store.contains("dir/block")
        assert not any(map(store.contains, ("dir", "block", "dir/block2", "dir/bloc", "dir/b/c")))

    def test_different_keys_are_different_blocks(self, store: kvio.Store) -> None:
        """Keys that differ in one character, or only in case, never share a block."""
        for key in _DISTINCT:
            store.write_block(key, key.encode() * 3, if_exists="error")

        assert {key: bytes(store.read_block(key)) for key in _DISTINCT} == {
            key: key.encode() * 3 for key in _DISTINCT
        }
        assert sorted(store.list_keys()) == sorted(_DISTINCT)

    def test_keys_may_be_200_characters(self, store: kvio.Store) -> None:
        """The longest keys, in one segment and in a hundred, are stored and listed."""
        longest = ("k" * 200, "/".join("k" * 100) + "x", "d" * 100 + "/" + "k" * 99)
        for key in longest:
            store.write_block(key, key.encode())

        assert [bytes(store.read_block(key)).decode() for key in longest] == list(longest)
        assert sorted(store.list_keys()) == sorted(longest)

    def test_a_key_below_another_key(self, store: kvio.Store) -> None:
        """``a`` and ``a/b`` are two blocks, or the second is refused and the first stays."""
        for first, second in (("a", "a/b"), ("c/d/e", "c/d")):
            store.write_block(first, b"first")
            if self.nested_keys:
                store.write_block(second, b"second")

                assert self.holds(store, second, b"second")
            else:
                for if_exists in ("keep", "replace", "error"):
                    with pytest.raises(kvio.KvioError):
                        store.write_block(second, b"second", if_exists=if_exists)

            assert self.holds(store, first, b"first")

    def test_listing_gives_every_key_once(self, store: kvio.Store) -> None:
        """All keys are listed, and those with a prefix, which need not end at a segment."""
        assert list(store.list_keys()) == []
        for key in _LISTED:
            store.write_block(key, b"bytes")

        assert sorted(store.list_keys()) == sorted(_LISTED)
        for prefix in ("b", "b/", "b/c", "b/c/1", "bb", "nothing", "b/c/1/", "/"):
            expected = sorted(key for key in _LISTED if key.startswith(prefix))
            assert sorted(store.list_keys(prefix)) == expected, prefix

    def test_listing_many_keys(self, store: kvio.Store) -> None:
        """Keys in many directories are all listed, and none of those deleted."""
        keys = [f"many/{i % 7}/{i:04}" for i in range(150)]
        store.write_blocks([(key, b"x") for key in keys])
        store.delete_blocks(keys[::2])

        assert sorted(store.list_keys("many/")) == sorted(keys[1::2])

    def test_deleting_during_a_listing(self, store: kvio.Store) -> None:
        """A listing survives the deletion of what it lists and gives no key twice."""
        keys = {f"key/{i}" for i in range(50)}
        store.write_blocks([(key, b"x") for key in keys])
        seen = []

        for key in store.list_keys("key/"):
            seen.append(key)
            store.delete_block(key)

        assert len(seen) == len(set(seen))
        assert keys.issuperset(seen)

    def test_deletion_says_whether_there_was_a_block(self, store: kvio.Store) -> None:
        """The first deletion is True and the block gone; the second is False."""
        store.write_block("dir/block", b"bytes")

        assert store.delete_block("dir/block") is True
        assert not store.contains("dir/block")
        assert list(store.list_keys()) == []
        assert store.delete_block("dir/block") is False
        assert store.delete_block("never/was") is False
        if self.has_hook("raw_get"):
            assert self.raw_get(store, "dir/block") is None

    def test_a_deleted_key_is_free(self, store: kvio.Store) -> None:
        """After a deletion the key takes other bytes, even with ``error``."""
        store.write_block("block", b"first")
        store.delete_block("block")

        store.write_block("block", b"other", if_exists="error")

        assert self.holds(store, "block", b"other")

    def test_count_leading_stops_at_the_first_gap(self, store: kvio.Store) -> None:
        """The count is how many keys from the front are there, whatever comes after."""
        keys = [f"prefix/{i}" for i in range(300)]
        store.write_blocks([(key, b"x") for key in keys[:280]])
        store.delete_block(keys[270])

        assert store.count_leading(keys) == 270
        assert store.count_leading(keys[271:]) == 9
        assert store.count_leading(keys[:10]) == 10
        assert store.count_leading([]) == 0
        assert store.count_leading(["missing", *keys]) == 0
        assert store.count_leading(iter([keys[0], keys[0], keys[270]])) == 2

    def test_verify_block_says_ok_or_missing(self, store: kvio.Store) -> None:
        """Verifying an intact block is ok, with its length; of none, missing."""
        store.write_block("block", payload(70_000))

        assert store.verify_block("block").ok
        assert store.verify_block("block").nbytes == 70_000
        assert store.verify_block("missing").status is kvio.BlockStatus.MISSING

    def test_dropping_the_cache_changes_no_block(self, store: kvio.Store) -> None:
        """One result per key, in order, and every block is read as it was written."""
        items = [(f"block/{i}", payload(40_000 * i, i)) for i in range(4)]
        store.write_blocks(items)

        results = store.drop_cache(iter([*(key for key, _ in items), "missing"]))

        assert [r.key for r in results] == [*(key for key, _ in items), "missing"]
        assert all(r.ok for r in results[:4])
        assert results[4].status in (kvio.BlockStatus.OK, kvio.BlockStatus.MISSING)
        assert all(bytes(store.read_block(key)) == data for key, data in items)
        assert store.drop_cache([]) == []
        with pytest.raises(kvio.InvalidKeyError):
            store.drop_cache(["block/0", "../block"])

    def test_the_path_of_a_block_is_a_file_that_begins_with_it(self, store: kvio.Store) -> None:
        """Or the backend says that its blocks are not files."""
        data = payload(70_000)
        store.write_block("dir/block", data)
        try:
            path = store.path_of("dir/block")
        except kvio.UnsupportedError:
            return

        assert path.is_absolute()
        assert path.read_bytes()[: len(data)] == data
        with pytest.raises(kvio.BlockNotFoundError):
            store.path_of("dir/missing")

    def test_sweep_leaves_blocks_alone(self, store: kvio.Store) -> None:
        """Sweeping temporaries of any age removes no block."""
        store.write_block("tmp/block", b"bytes")

        assert store.sweep(older_than_s=0.0) == []
        assert self.holds(store, "tmp/block", b"bytes")
