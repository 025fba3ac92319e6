"""``reader.reader_classname``: reads blocks where DLIO's own reader of a format opens files.

Derived from FormatReader alone: the readers of some DLIO versions mix in code that opens paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlio_benchmark.reader.reader_handler import FormatReader

from kvio.connectors.dlio import blocks, decoding
from kvio.connectors.dlio.names import key_of


class KvioReader(FormatReader):  # type: ignore[misc, unused-ignore]  # DLIO has no types
    """Reads samples of the format of the workload, through `kvio.Store.read_block`."""

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index)
        self.epoch = epoch
        self._rereader: blocks.Rereader | None = None
        self._format = str(self._args.format)
        self._decodes = blocks.settings().decode
        if self._decodes:
            decoding.check_format(self._format)

    def reuse_memory(self) -> None:
        """Promise that nothing of a sample is used once the next is opened."""
        self._rereader = blocks.Rereader()

    def open(self, filename: str) -> Any:
        """Read a block and make of it what samples are taken from.

        Raises:
            BlockNotFoundError, StorageError, CorruptBlockError: with the block's name.
        """
        key = key_of(filename)
        block = self._rereader.read(key) if self._rereader else blocks.read_sample(key)
        return decoding.decode(self._format, block, key=key) if self._decodes else block

    def close(self, filename: str) -> None:
        """Nothing is held open."""

    def get_sample(self, filename: str, sample_index: int) -> None:
        """Take a sample; DLIO hands on another array of the size asked for."""
        if self._decodes:
            decoding.sample(self._format, self.open_file_map[filename], sample_index)

    def next(self) -> Iterator[Any]:
        """Yield the batches of this thread."""
        yield from super().next()

    def read_index(self, image_idx: int, step: int) -> Any:
        """Read the sample of an index."""
        return super().read_index(image_idx, step)

    def finalize(self) -> None:
        """Nothing is held open."""

    def is_index_based(self) -> bool:
        """Samples can be asked for by number."""
        return True

    def is_iterator_based(self) -> bool:
        """And in order."""
        return True
