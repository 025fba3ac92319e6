"""``reader.reader_classname``: reads blocks where DLIO's own reader of a format opens files.

Derived from FormatReader alone: the readers of some DLIO versions mix in code that opens paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlio_benchmark.reader.reader_handler import FormatReader

from kvio.connectors.dlio import blocks, decoding, indexed
from kvio.connectors.dlio.names import key_of
from kvio.connectors.dlio.plan import INDEXED


class KvioReader(FormatReader):  # type: ignore[misc, unused-ignore]  # DLIO has no types
    """Reads samples of the format of the workload, through `kvio.Store.read_block`."""

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index)
        self.epoch = epoch
        self._reading: dict[str, blocks.Rereader] = {}
        self._spare: list[blocks.Rereader] = []
        self._format = str(self._args.format)
        self._decodes = blocks.settings().decode
        self._indexes = indexed.shared(str(dataset_type)) if self._format in INDEXED else None
        if self._decodes:
            decoding.check_format(self._format)

    def open(self, filename: str) -> Any:
        """Read a block and make of it what samples are taken from; of an indexed one, its index.

        Its memory is used again once it is closed.

        Raises:
            BlockNotFoundError, StorageError, CorruptBlockError: with the block's name.
        """
        key = key_of(filename)
        if self._indexes is not None:
            return self._indexes.of(key)
        rereader = self._reading.pop(filename, None)
        rereader = rereader or (self._spare.pop() if self._spare else blocks.Rereader())
        self._reading[filename] = rereader
        block = rereader.read(key)
        return decoding.decode(self._format, block, key=key) if self._decodes else block

    def close(self, filename: str) -> None:
        """Be done with a block and what was made of it."""
        rereader = self._reading.pop(filename, None)
        if rereader is not None:
            self._spare.append(rereader)

    def get_sample(self, filename: str, sample_index: int) -> None:
        """Take a sample; DLIO hands on another array of the size asked for.

        Raises:
            CorruptBlockError: the block has no such sample.
            BlockNotFoundError, StorageError: of an indexed one, with its name.
        """
        opened = self.open_file_map[filename]
        if self._indexes is not None:
            opened.read(sample_index)
        elif self._decodes:
            decoding.sample(self._format, opened, sample_index, key=key_of(filename))

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
