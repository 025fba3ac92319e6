"""Writing: the bytes that are read back, the receipt, and existing blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio.testing.hooks import INVALID_KEYS, StoreTests, level_of
from kvio.testing.payloads import crc32c, cut, payload


class WritingTests(StoreTests):
    """The promises of `Store.write_block`."""

    def test_blocks_of_every_size_come_back_as_written(self, store: kvio.Store) -> None:
        """Each length around alignments and limits is stored whole and reads back bit for bit."""
        for nbytes in self.sizes:
            data = payload(nbytes, nbytes)

            receipt = store.write_block(f"size/{nbytes}", data)

            assert receipt.nbytes == nbytes
            assert self.holds(store, f"size/{nbytes}", data), nbytes
            assert store.stat_block(f"size/{nbytes}").nbytes == nbytes

    @pytest.mark.kvio_large
    def test_large_blocks_come_back_as_written(self, store: kvio.Store) -> None:
        """Blocks beyond every chunk and segment come back bit for bit, from any alignment."""
        for nbytes in self.large_sizes:
            aligned = kvio.aligned_buffer(nbytes + 1)
            for shift in (0, 1):
                source = aligned[shift : shift + nbytes]
                source[:] = payload(nbytes, shift)

                store.write_block("large", source, if_exists="replace")

                assert self.holds(store, "large", payload(nbytes, shift)), (nbytes, shift)

    def test_receipt_says_what_was_stored(self, store: kvio.Store) -> None:
        """A receipt names the block, its length, the level asked for and a mode with a reason."""
        receipt = store.write_block("block", b"twelve bytes")

        assert (receipt.key, receipt.nbytes, receipt.existed) == ("block", 12, False)
        assert receipt.level is level_of(store)
        assert isinstance(receipt.mode, kvio.IOMode)
        assert receipt.reason

    def test_receipt_is_immutable(self, store: kvio.Store) -> None:
        """A receipt cannot be changed."""
        receipt = store.write_block("block", b"bytes")

        with pytest.raises(AttributeError):
            receipt.nbytes = 6  # type: ignore[misc]

    def test_checksum_is_the_crc32c_of_the_payload(self, store: kvio.Store) -> None:
        """A checksum in a receipt or a stat is the CRC32C of the payload, however it was cut."""
        for nbytes in (0, 1, 63, 64, 4096, 4097, 66_001):
            data = payload(nbytes, 7)

            receipt = store.write_block(f"crc/{nbytes}", cut(data, [nbytes // 3, nbytes // 3]))

            allowed = (crc32c(data),) if store.capabilities.checksum else (crc32c(data), None)
            assert receipt.checksum in allowed
            assert store.stat_block(f"crc/{nbytes}").checksum in allowed

    def test_checksum_of_a_large_block_is_that_of_its_bytes(self, store: kvio.Store) -> None:
        """A block written in segments has the checksum of the same bytes written in one piece."""
        data = payload(max(self.sizes), 3)

        whole = store.write_block("whole", data)
        pieces = store.write_block("pieces", cut(data, [1, len(data) // 2, 1]))

        assert whole.checksum == pieces.checksum

    def test_pieces_are_joined_in_order(self, store: kvio.Store) -> None:
        """A sequence of buffers becomes one block, with empty and misaligned pieces."""
        data = payload(70_000, 1)
        pieces = cut(data, [0, 1, 0, 4095, 4096, 17, 512, 0, 60_000])

        receipt = store.write_block("pieces", [*pieces, b""])

        assert receipt.nbytes == len(data)
        assert self.holds(store, "pieces", data)

    def test_more_pieces_than_one_system_call_takes(self, store: kvio.Store) -> None:
        """Over 1024 pieces (IOV_MAX) become one block, written whole."""
        data = payload(3 * 2500, 2)

        store.write_block("many", cut(data, [3] * 2499))

        assert self.holds(store, "many", data)

    def test_no_pieces_are_an_empty_block(self, store: kvio.Store) -> None:
        """An empty sequence and a sequence of empty buffers are blocks of no bytes."""
        store.write_block("none", [])
        store.write_block("empty", [b"", bytearray()])

        assert self.holds(store, "none", b"")
        assert self.holds(store, "empty", b"")

    def test_pieces_of_any_alignment_and_length(self, store: kvio.Store) -> None:
        """Large pieces whose addresses and lengths fit no alignment are stored as they are."""
        memory = kvio.aligned_buffer(300_000)
        memory[:] = payload(300_000, 4)
        pieces = [memory[1:100_000], memory[100_003:200_000], memory[200_000:299_999]]

        store.write_block("crooked", pieces)

        assert self.holds(store, "crooked", b"".join(pieces))

    def test_source_may_be_reused_after_the_call(self, store: kvio.Store) -> None:
        """Changing the source after a write changes nothing that is stored."""
        source = bytearray(payload(70_000, 5))

        store.write_block("block", source)
        source[:] = bytes(70_000)

        assert self.holds(store, "block", payload(70_000, 5))

    def test_keep_leaves_the_standing_block(self, store: kvio.Store) -> None:
        """By default the second write of a key has ``existed``, and the first one's bytes stay."""
        store.write_block("block", b"first")

        receipt = store.write_block("block", b"later")

        assert receipt.existed
        assert receipt.nbytes == 5
        assert self.holds(store, "block", b"first")
        if store.capabilities.checksum:
            assert receipt.checksum == crc32c(b"first")

    def test_keep_replaces_a_block_of_another_length(self, store: kvio.Store) -> None:
        """With ``keep`` an existing block of another length is replaced."""
        for standing, written in ((b"longer than that", b"short"), (b"", b"x"), (b"x", b"")):
            store.write_block("block", standing, if_exists="replace")

            receipt = store.write_block("block", written, if_exists="keep")

            assert not receipt.existed
            assert self.holds(store, "block", written)

    def test_replace_writes_whatever_stands_there(self, store: kvio.Store) -> None:
        """``replace`` puts the new bytes in the place of any old ones."""
        for data in (b"first", b"other", b"much longer than before", b"", b"again"):
            receipt = store.write_block("block", data, if_exists="replace")

            assert not receipt.existed
            assert self.holds(store, "block", data)

    def test_error_refuses_a_taken_key(self, store: kvio.Store) -> None:
        """``error`` writes a free key, refuses a taken one by name, and leaves it alone."""
        store.write_block("block", b"first", if_exists="error")

        with pytest.raises(kvio.BlockExistsError) as caught:
            store.write_block("block", b"later", if_exists="error")

        assert caught.value.key == "block"
        assert self.holds(store, "block", b"first")

    def test_unknown_if_exists_is_refused(self, store: kvio.Store) -> None:
        """A misspelt ``if_exists`` is a ConfigError, and nothing is written."""
        wrong: Any = "overwrite"

        with pytest.raises(kvio.ConfigError):
            store.write_block("block", b"bytes", if_exists=wrong)

        assert not store.contains("block")

    def test_invalid_keys_are_refused_by_every_verb(self, store: kvio.Store) -> None:
        """An invalid key raises InvalidKeyError before any I/O."""
        calls: tuple[Callable[[str], object], ...] = (
            lambda key: store.write_block(key, b"bytes"),
            lambda key: store.read_block(key),
            lambda key: store.read_block_into(key, bytearray(5)),
            lambda key: store.stat_block(key),
            lambda key: store.contains(key),
            lambda key: store.delete_block(key),
            lambda key: store.verify_block(key),
            lambda key: store.count_leading([key]),
            lambda key: store.submit_write(key, b"bytes"),
            lambda key: store.submit_read_into(key, bytearray(5)),
            lambda key: store.write_blocks([("fine", b"bytes"), (key, b"bytes")]),
        )
        for key in INVALID_KEYS:
            for call in calls:
                with pytest.raises(kvio.InvalidKeyError) as caught:
                    call(key)
                assert caught.value.key == key
        assert list(store.list_keys()) == []

    def test_a_file_under_an_invalid_key_is_refused(self, store: kvio.Store) -> None:
        """And stays, also where it was to be moved."""
        for key in INVALID_KEYS:
            with pytest.raises(kvio.InvalidKeyError):
                store.write_file(key, __file__, move=True)
        assert Path(__file__).is_file()

    def test_files_of_every_size_are_stored_as_they_are(self, store: kvio.Store) -> None:
        """A file is stored bit for bit and stays; with *move* it is gone when it is stored."""
        with store.scratch_dir() as directory:
            for nbytes in self.sizes:
                data = payload(nbytes, nbytes)
                for move in (False, True):
                    key, path = f"file/{nbytes}/{move}", directory / "file"
                    path.write_bytes(data)

                    receipt = store.write_file(key, path, move=move)

                    assert (receipt.key, receipt.nbytes, receipt.existed) == (key, nbytes, False)
                    assert receipt.level is level_of(store)
                    assert self.holds(store, key, data), nbytes
                    assert store.verify_block(key).ok
                    assert path.exists() != move

    def test_a_file_whose_block_is_there_follows_if_exists(self, store: kvio.Store) -> None:
        """As a write of its bytes does; one that is to move stays only where it is refused."""
        store.write_block("block", b"first")
        with store.scratch_dir() as directory:
            path = directory / "file"
            path.write_bytes(b"later")

            with pytest.raises(kvio.BlockExistsError):
                store.write_file("block", path, move=True, if_exists="error")
            assert path.read_bytes() == b"later"
            assert store.write_file("block", path, move=True).existed
            assert not path.exists()
            assert self.holds(store, "block", b"first")

            path.write_bytes(b"later")
            assert not store.write_file("block", path, move=True, if_exists="replace").existed
            assert not path.exists()
            assert self.holds(store, "block", b"later")

    def test_a_file_that_cannot_be_read_is_refused(self, store: kvio.Store) -> None:
        """A file that is missing, or is none, raises StorageError, and nothing is stored."""
        with store.scratch_dir() as directory:
            for path in (directory / "missing", directory):
                for move in (False, True):
                    with pytest.raises(kvio.StorageError) as caught:
                        store.write_file("block", path, move=move)
                    assert caught.value.key == "block"
        assert not store.contains("block")

    def test_data_that_is_no_contiguous_buffer_is_refused(self, store: kvio.Store) -> None:
        """What needs a copy, or has no bytes of its own, is refused before anything is written."""
        gaps = memoryview(bytearray(100))[::2]

        with pytest.raises(kvio.BlockSizeError):
            store.write_block("block", gaps)
        objects = (ctypes.py_object * 1)()
        for wrong in ("text", 5, None, [b"fine", "text"], objects, [b"fine", objects]):
            with pytest.raises(TypeError):
                store.write_block("block", wrong)

        assert not store.contains("block")

    def test_a_finished_write_leaves_nothing_but_the_block(self, store: kvio.Store) -> None:
        """Kept, refused and replaced blocks leave no temporary behind."""
        self.require("raw_leftovers")
        store.write_block("block", b"first")
        store.write_block("block", b"later")
        store.write_block("block", b"other length", if_exists="replace")
        with pytest.raises(kvio.BlockExistsError):
            store.write_block("block", b"never", if_exists="error")

        assert self.raw_leftovers(store) == []
