"""Run DLIO on kvio: generated data, reads and checkpoints are blocks of a store.

Start ``dlio_benchmark workload=unet3d_a100 +kvio=posix-direct kvio.root=/mnt/data``. For launchers
that only pass workload options, set ``KVIO_DLIO=posix-direct:///mnt/data`` instead. See
docs/dlio.md.

DLIO has no plugin interface for storage, so `kvio.connectors.dlio.wiring` implements
``storage_type: parallel_fs``, which DLIO declares but does not implement. A run fails unless every
rank wrote and read the blocks that its workload requires.
"""
