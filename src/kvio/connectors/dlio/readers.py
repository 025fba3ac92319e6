"""Read blocks instead of files, for every format of DLIO.

The reader derives from FormatReader only, because the other readers of some DLIO versions open
paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlio_benchmark.reader.reader_handler import FormatReader

from kvio.connectors.dlio import blocks, decoding, indexed, interfaces
from kvio.connectors.dlio.plan import INDEXED
from kvio.connectors.dlio.settings import key_of


class KvioReader(FormatReader):  # type: ignore[misc, unused-ignore]  # DLIO has no types
    """Reads samples in the workload's format from a `kvio.Store`."""

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index)
        self.epoch = epoch
        self._reading: dict[str, blocks.Rereader] = {}
        self._spare: list[blocks.Rereader] = []
        self._format = str(self._args.format)
        decode = blocks.settings().decode
        self._decodes = interfaces.decodes(self._format) if decode is None else decode
        self._indexes = indexed.shared(str(dataset_type)) if self._format in INDEXED else None
        if self._decodes:
            decoding.check_format(self._format)

    def open(self, filename: str) -> Any:
        """Read and decode a block, or read the index of a block in an indexed format.

        The buffer is reused after `close`.

        Raises:
            BlockNotFoundError, StorageError, CorruptBlockError: a block could not be read or
                decoded; the error names it.
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
        """Release the buffer of a block."""
        rereader = self._reading.pop(filename, None)
        if rereader is not None:
            self._spare.append(rereader)

    def get_sample(self, filename: str, sample_index: int) -> None:
        """Read a sample and discard it; DLIO passes on a dummy array of the requested size.

        Raises:
            CorruptBlockError: the block has no such sample.
            BlockNotFoundError, StorageError: in an indexed format, the read failed.
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
        """Read the sample with an index."""
        return super().read_index(image_idx, step)

    def finalize(self) -> None:
        """Do nothing: no resource is open."""

    def is_index_based(self) -> bool:
        """Return True: samples can be read by number."""
        return True

    def is_iterator_based(self) -> bool:
        """Return True: samples can be read in order."""
        return True
