"""Run MLCommons' KV-cache benchmark on kvio: its storage tier is a store or a staging tier.

The program (https://github.com/mlcommons/storage, folder kv_cache_benchmark) is used as it is::

    python -m kvio.connectors.mlperf_kv --program kv_cache_benchmark --store hybrid:///mnt/kv -- \
        --model tiny-1b --num-users 4 --gpu-mem-gb 0 --cpu-mem-gb 0 --duration 60

`KvioBackend` is its interface of a storage tier over any `kvio.BlockStore`. See docs/mlperf-kv.md.
"""

from kvio.connectors.mlperf_kv.backend import Counts, KvioBackend, Timing

__all__ = ["Counts", "KvioBackend", "Timing"]
