"""Blocks that are written and read as files, of any length."""

from __future__ import annotations

import io
import zipfile
from functools import partial

import pytest

import kvio
from kvio import KiB, MiB
from kvio.core import block_files, streams
from kvio.testing.hooks import StoreTests
from kvio.testing.payloads import payload

#: More than a writer holds before it begins to store, and than a reader reads at once, here.
_LONG = 3 * MiB + 3
_HELD = 256 * KiB


def _write_and_fail(file: io.RawIOBase | io.BufferedIOBase, piece: bytes) -> None:
    file.write(piece)
    raise TypeError("of the caller, after the last byte")


class FileTests(StoreTests):
    """The promises of `Store.open_writer` and `Store.open_reader`."""

    @pytest.fixture(autouse=True)
    def _small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(block_files, "HELD_BYTES", _HELD)
        monkeypatch.setattr(block_files, "_PIECE_BYTES", 64 * KiB)
        monkeypatch.setattr(streams, "_PIECE_BYTES", MiB)

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 300_001])
    def test_what_is_written_in_pieces_is_one_block(self, store: kvio.Store, nbytes: int) -> None:
        """However the bytes are cut, the block is the same, and its receipt that of a write."""
        data = payload(nbytes, 1)
        for step in (7919, nbytes + 1):
            with store.open_writer(f"step/{step}") as file:
                assert file.write(b"") == 0
                for at in range(0, nbytes, step):
                    assert file.write(data[at : at + step]) == len(data[at : at + step])
                assert not store.contains(f"step/{step}")
            receipt = file.receipt

            assert receipt is not None
            assert (receipt.key, receipt.nbytes, receipt.existed) == (file.key, nbytes, False)
            assert self.holds(store, file.key, data)
            with store.open_reader(file.key) as reader:
                assert reader.readall() == data
            with store.open_reader(file.key) as reader:
                assert b"".join(iter(partial(reader.read, 1000), b"")) == data

    def test_a_long_block_needs_little_memory_at_once(self, store: kvio.Store) -> None:
        """It is stored while it is written, and verified while it is read."""
        data = payload(_LONG, 1)
        with store.open_writer("long", nbytes=_LONG) as file:
            for at in range(0, _LONG, 200_017):
                file.write(data[at : at + 200_017])
            assert not store.contains("long")

        assert file.receipt is not None
        assert file.receipt.nbytes == _LONG
        with io.BufferedReader(store.open_reader("long")) as reader:
            assert reader.read(70_000) == data[:70_000]
            assert reader.read() == data[70_000:]
        with store.open_reader("long", offset=5, nbytes=2 * MiB) as part:
            assert part.readall() == data[5 : 5 + 2 * MiB]

    @pytest.mark.parametrize("nbytes", [10, _LONG])
    def test_what_fails_stores_nothing(self, store: kvio.Store, nbytes: int) -> None:
        """An exception, `abort`, a dropped writer and a wrong length leave the key free."""
        piece = bytes(nbytes)
        with pytest.raises(TypeError), store.open_writer("raised", nbytes=nbytes) as file:
            _write_and_fail(file, piece)
        file = store.open_writer("aborted")
        file.write(piece)
        file.abort()
        file.close()
        dropped = store.open_writer("dropped")
        dropped.write(piece)
        with pytest.warns(ResourceWarning, match="dropped"):
            del dropped
        with pytest.raises(kvio.BlockSizeError), store.open_writer("short", nbytes=nbytes + 1) as f:
            f.write(piece)
        longer = store.open_writer("longer", nbytes=nbytes)
        longer.write(piece)
        with pytest.raises(kvio.BlockSizeError):
            longer.write(b"x")
        with pytest.raises(kvio.StorageError, match="nothing is stored"):
            longer.close()

        assert file.receipt is None
        assert list(store.list_keys()) == []

    @pytest.mark.parametrize("nbytes", [10, _LONG])
    def test_an_existing_block_is_treated_as_by_a_write(
        self, store: kvio.Store, nbytes: int
    ) -> None:
        """``keep``, ``replace`` and ``error`` mean what they mean for `write_block`."""
        old, new = payload(nbytes, 1), payload(nbytes, 2)
        store.write_block("key", old)
        with store.open_writer("key") as kept:
            kept.write(new)
        assert kept.receipt is not None
        assert kept.receipt.existed
        with (
            pytest.raises(kvio.BlockExistsError),  # some notice it at once, some at the end
            store.open_writer("key", if_exists="error") as refused,
        ):
            refused.write(new)
        assert self.holds(store, "key", old)
        with store.open_writer("key", if_exists="replace") as replaced:
            replaced.write(new)

        assert self.holds(store, "key", new)

    def test_what_needs_a_file_object_can_use_it(self, store: kvio.Store) -> None:
        """A writer that cannot seek is enough for an archive."""
        with store.open_writer("zip") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a", payload(50_000, 1))

        whole = io.BytesIO(store.open_reader("zip").readall())
        assert zipfile.ZipFile(whole).read("a") == payload(50_000, 1)

    def test_what_wraps_a_writer_does_not_store_for_it(self, store: kvio.Store) -> None:
        """A wrapper that closes it in a failing ``with`` stores nothing, in a good one all."""
        with (
            pytest.raises(TypeError),
            store.open_writer("failed") as file,
            io.BufferedWriter(file) as buffered,
        ):
            _write_and_fail(buffered, b"12345")
        with (
            store.open_writer("text") as file,
            io.TextIOWrapper(io.BufferedWriter(file), encoding="ascii") as text,
        ):
            text.write("12345")

        assert list(store.list_keys()) == ["text"]
        assert self.holds(store, "text", b"12345")

    def test_a_missing_block_and_a_wrong_range_cannot_be_opened(self, store: kvio.Store) -> None:
        """The error is that of a read, before the first read."""
        store.write_block("key", b"12345")

        with pytest.raises(kvio.BlockNotFoundError):
            store.open_reader("missing")
        with pytest.raises(kvio.BlockSizeError):
            store.open_reader("key", offset=6)
        with pytest.raises(kvio.InvalidKeyError):
            store.open_writer("/key")
        with pytest.raises(kvio.BlockSizeError):
            store.open_writer("key", nbytes=-1)
        assert store.open_reader("key", offset=5).read() == b""
        assert store.open_reader("key", offset=1, nbytes=3).read() == b"234"

    def test_a_store_that_closes_ends_its_writers(self, store: kvio.Store) -> None:
        """They store nothing, and say so."""
        writers = [store.open_writer("short"), store.open_writer("long")]
        for writer, nbytes in zip(writers, (10, _LONG), strict=True):
            writer.write(bytes(nbytes))
        store.close()

        for writer in writers:
            for error in (kvio.StoreClosedError, kvio.StorageError):
                with pytest.raises(error, match="closed"):
                    writer.close()
            assert writer.closed
        with pytest.raises(kvio.StoreClosedError):
            store.open_writer("key")
        with pytest.raises(kvio.StoreClosedError):
            store.open_reader("key")
