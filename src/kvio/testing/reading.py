"""Reading: into the caller's memory or fresh memory, whole blocks and ranges."""

from __future__ import annotations

import ctypes

import pytest

import kvio
from kvio.testing.hooks import StoreTests
from kvio.testing.payloads import Guarded, payload

#: Ranges of a block of 70,000 bytes, as (offset, nbytes), around its end and odd alignments.
_RANGES = (
    *((0, 0), (0, 1), (0, 4096), (1, 4095), (4095, 2), (4096, 4096), (63, 65), (511, 513)),
    *((65535, 2), (69_999, 1), (69_999, 2), (70_000, 0), (70_000, 5), (0, 70_000), (0, 70_001)),
    *((17, 69_983), (17, 80_000)),
)


class ReadingTests(StoreTests):
    """The promises of `Store.read_block` and `Store.read_block_into`."""

    def test_reading_fills_exactly_the_callers_memory(self, store: kvio.Store) -> None:
        """Every size reads into aligned and misaligned memory, and not a byte beside it."""
        for nbytes in self.sizes:
            data = payload(nbytes, 11)
            store.write_block(f"size/{nbytes}", data)
            for misalign in (0, 1, 33):
                out = Guarded(nbytes, misalign=misalign)

                assert store.read_block_into(f"size/{nbytes}", out.view) == nbytes
                assert out.view == data, nbytes
                assert out.intact(), nbytes

    @pytest.mark.kvio_large
    def test_large_blocks_read_into_any_memory(self, store: kvio.Store) -> None:
        """Blocks beyond every segment read into larger, scattered and misaligned memory."""
        for nbytes in self.large_sizes:
            data = payload(nbytes, 13)
            store.write_block("large", data, if_exists="replace")
            out = Guarded(nbytes + 5000, misalign=1)
            pieces = [out.view[:4097], out.view[4097:1_000_000], out.view[1_000_000:]]

            assert store.read_block_into("large", pieces) == nbytes
            assert out.view[:nbytes] == data
            assert out.intact()

    def test_aligned_memory_is_filled_like_any_other(self, store: kvio.Store) -> None:
        """Page-aligned memory from `aligned_buffer` gives the same bytes."""
        for nbytes in (4096, 8192, 65_536, 70_000):
            store.write_block(f"aligned/{nbytes}", payload(nbytes, 3))
            out = kvio.aligned_buffer(nbytes)

            assert store.read_block_into(f"aligned/{nbytes}", out) == nbytes
            assert out == payload(nbytes, 3)

    def test_larger_memory_takes_the_whole_block(self, store: kvio.Store) -> None:
        """A buffer with room to spare holds the block at its start."""
        for nbytes in (0, 1, 4096, 70_000):
            store.write_block(f"block/{nbytes}", payload(nbytes, 1))
            for spare in (1, 64, 4096, 100_000):
                out = Guarded(nbytes + spare)

                assert store.read_block_into(f"block/{nbytes}", out.view) == nbytes
                assert out.view[:nbytes] == payload(nbytes, 1)
                assert out.intact()

    def test_smaller_memory_is_refused(self, store: kvio.Store) -> None:
        """A block is never read in part by accident: too little room is a BlockSizeError."""
        for nbytes in (1, 64, 4096, 70_000):
            store.write_block(f"block/{nbytes}", payload(nbytes, 1))
            for room in {0, nbytes // 2, nbytes - 1}:
                out = Guarded(room)

                with pytest.raises(kvio.BlockSizeError) as caught:
                    store.read_block_into(f"block/{nbytes}", out.view)

                assert caught.value.key == f"block/{nbytes}"
                assert out.intact()

    def test_bytes_are_scattered_in_order(self, store: kvio.Store) -> None:
        """A sequence of buffers is filled one after the other, empty ones included."""
        data = payload(70_000, 6)
        store.write_block("block", data)
        outs = [Guarded(n, misalign=n % 7) for n in (0, 1, 4095, 0, 4096, 513, 61_295)]

        assert store.read_block_into("block", [out.view for out in outs]) == 70_000

        assert b"".join(out.view for out in outs) == data
        assert all(out.intact() for out in outs)

    def test_more_pieces_than_one_system_call_fills(self, store: kvio.Store) -> None:
        """Over 1024 buffers (IOV_MAX) are filled in one call."""
        data = payload(2500 * 3, 8)
        store.write_block("block", data)
        out = Guarded(len(data))

        pieces = [out.view[at : at + 3] for at in range(0, len(data), 3)]

        assert store.read_block_into("block", pieces) == len(data)
        assert out.view == data

    def test_fresh_memory_is_aligned_and_the_callers_own(self, store: kvio.Store) -> None:
        """`read_block` gives page-aligned writable memory; changing it changes no block."""
        store.write_block("block", payload(5000, 1))

        view = store.read_block("block")
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        view[:] = bytes(5000)

        assert address % 4096 == 0
        assert self.holds(store, "block", payload(5000, 1))

    def test_ranges_are_slices(self, store: kvio.Store) -> None:
        """A range is what slicing the block gives, in fresh memory and in the caller's."""
        data = payload(70_000, 9)
        store.write_block("block", data)
        for offset, nbytes in _RANGES:
            out = Guarded(nbytes, misalign=1)
            expected = data[offset : offset + nbytes]

            assert store.read_block("block", offset=offset, nbytes=nbytes) == expected
            got = store.read_block_into("block", out.view, offset=offset, nbytes=nbytes)

            assert out.view[:got] == expected, (offset, nbytes)
            assert got == len(expected)
            assert out.intact()

    def test_offset_alone_reads_on_to_the_end(self, store: kvio.Store) -> None:
        """With only an offset, the rest of the block is read, as far as there is room."""
        data = payload(70_000, 9)
        store.write_block("block", data)
        for offset in (1, 4096, 69_999, 70_000):
            small, large = Guarded(10), Guarded(80_000)

            assert store.read_block("block", offset=offset) == data[offset:]
            assert store.read_block_into("block", large.view, offset=offset) == 70_000 - offset
            got = store.read_block_into("block", small.view, offset=offset)

            assert large.view[: 70_000 - offset] == data[offset:]
            assert small.view[:got] == data[offset : offset + 10]
            assert small.intact()

    def test_nbytes_reads_no_more_than_it_says(self, store: kvio.Store) -> None:
        """Memory beyond *nbytes* is left as it was by a range that ends before it."""
        store.write_block("block", payload(70_000, 9))
        out = bytearray(b"\xee" * 20_000)

        got = store.read_block_into("block", out, offset=3, nbytes=10_000)

        assert got == 10_000
        assert out[:got] == payload(70_000, 9)[3:10_003]

    def test_ranges_that_cannot_be_are_refused(self, store: kvio.Store) -> None:
        """Beyond the end, negative, or more than there is room for: BlockSizeError."""
        store.write_block("block", b"ten bytes.")
        out = Guarded(5)

        for offset, nbytes in ((11, 1), (11, None), (-1, 1), (0, -1), (0, 6), (1 << 40, 1)):
            with pytest.raises(kvio.BlockSizeError):
                store.read_block_into("block", out.view, offset=offset, nbytes=nbytes)
        for offset in (11, -1, 1 << 40):
            with pytest.raises(kvio.BlockSizeError):
                store.read_block("block", offset=offset)
        assert out.intact()

    def test_a_miss_names_the_block(self, store: kvio.Store) -> None:
        """A block that is not there is BlockNotFoundError, which is a LookupError."""
        store.write_block("some/block", b"bytes")
        calls = (
            lambda key: store.read_block(key),
            lambda key: store.read_block(key, offset=1, nbytes=1),
            lambda key: store.read_block_into(key, bytearray(5)),
            lambda key: store.read_block_into(key, bytearray(5), offset=1),
            lambda key: store.stat_block(key),
        )
        for key in ("missing", "some/other", "no/such/directory"):
            for call in calls:
                with pytest.raises(kvio.BlockNotFoundError) as caught:
                    call(key)
                assert caught.value.key == key
                assert isinstance(caught.value, LookupError)

    def test_memory_that_cannot_be_filled_is_refused(self, store: kvio.Store) -> None:
        """Read-only, non-contiguous and foreign targets are refused before any I/O."""
        store.write_block("block", b"bytes")
        for wrong in (b"12345", memoryview(bytearray(10))[::2], [bytearray(2), bytes(3)]):
            with pytest.raises(kvio.BlockSizeError):
                store.read_block_into("block", wrong)
        with pytest.raises(TypeError):
            store.read_block_into("block", "12345")

        assert store.stats().bytes_read == 0
