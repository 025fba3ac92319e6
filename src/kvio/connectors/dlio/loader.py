"""Load data with ``read_threads`` reader threads in the rank's process.

There are no worker processes: nothing is pickled, counts are exact, and an error of a block stops
the run and names the block.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Final

import numpy as np
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.reader.reader_factory import ReaderFactory

from kvio.connectors.dlio import blocks, decoding, interfaces
from kvio.connectors.dlio.keeping import KeptBlocks
from kvio.connectors.dlio.plan import Read, Workload, workload_of
from kvio.connectors.dlio.readers import KvioReader
from kvio.connectors.dlio.settings import key_of

_READS_AHEAD: Final = 2  # per thread: one running and one queued


class KvioLoader(BaseDataLoader):  # type: ignore[misc, unused-ignore]  # DLIO has no types
    """Reads a rank's share of every epoch, in order, a few blocks ahead of the training.

    Supports ``read_threads``, ``prefetch_size``, ``sample_shuffle``, ``preprocess_time`` and DLIO's
    shuffled order of files; `Pass.order` defines the ranks' shares. Every thread has its own
    reader: kvio's, or DLIO's with ``local_fs``.
    """

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        self._passes = 0
        self._kept: KeptBlocks | None = None

    def read(self) -> None:
        """Prepare the first epoch."""
        self._own = threading.local()
        self._indexes = itertools.count()

    def next(self) -> Iterator[Any]:
        """Yield the batches of one epoch.

        Raises:
            BlockNotFoundError, StorageError, CorruptBlockError: a block could not be read or
                decoded; the error names it.
        """
        args = self._args
        self._passes += 1
        workload = workload_of(args)
        training = self.dataset_type is DatasetType.TRAIN
        one = workload.training if training else workload.evaluation
        files = args.file_list_train if training else args.file_list_eval
        order = one.order(args.my_rank, shuffle_seed=workload.shuffle_seed(self._passes))
        self._kept = self._kept_blocks(workload)
        samples = 0
        for taken in self._in_order(order, list(files)):
            samples += taken
            while samples >= self.batch_size:
                samples -= self.batch_size
                yield np.array([args.resized_image] * self.batch_size)

    def finalize(self) -> None:
        """Do nothing: no resource outlives an epoch."""

    def _kept_blocks(self, workload: Workload) -> KeptBlocks | None:
        """Return a cache for this epoch where shuffled samples of one block come apart."""
        args = self._args
        if not (workload.keeps_blocks and issubclass(args.reader_class or object, KvioReader)):
            return None
        run = blocks.settings()
        name = str(args.format)
        decodes = interfaces.decodes(name) if run.decode is None else run.decode
        return KeptBlocks(
            max_bytes=run.keep_bytes,
            decode=lambda key, block: decoding.decode(name, block, key=key) if decodes else block,
        )

    def _in_order(self, order: Iterable[Read], files: list[str]) -> Iterator[int]:
        threads = max(1, self._args.read_threads)
        ahead = threads * max(_READS_AHEAD, math.ceil(self._args.prefetch_size / threads))
        todo = iter(order)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="kvio-dlio")
        try:
            under_way: deque[Future[int]] = deque(
                pool.submit(self._load, files[read.file], read) for read in islice(todo, ahead)
            )
            while under_way:
                taken = under_way.popleft().result()
                for read in islice(todo, 1):
                    under_way.append(pool.submit(self._load, files[read.file], read))
                yield taken
        finally:
            pool.shutdown(cancel_futures=True)

    def _load(self, filename: str, read: Read) -> int:
        reader = self._reader()
        if self._kept is not None:
            with self._kept.opened(key_of(filename)) as opened:
                self._take(reader, opened, filename, read)
        else:
            self._take(reader, reader.open(filename), filename, read)
            reader.close(filename)  # some of DLIO's readers look for what is open
        del reader.open_file_map[filename]
        return len(read.samples)

    def _take(self, reader: Any, opened: Any, filename: str, read: Read) -> None:
        reader.open_file_map[filename] = opened
        for sample in read.samples:
            reader.get_sample(filename, sample)
            reader.preprocess()

    def _reader(self) -> Any:
        if not hasattr(self._own, "reader"):
            # The factory of some versions fails if a class is named.
            make = self._args.reader_class or ReaderFactory.get_reader
            which = (self.format_type,) if make is ReaderFactory.get_reader else ()
            index = next(self._indexes)
            self._own.reader = make(*which, self.dataset_type, index, self.epoch_number)
        return self._own.reader
