"""DLIO runs through kvio: what it generates, reads and checkpoints are blocks of a store.

``dlio_benchmark workload=unet3d_a100 +kvio=posix-direct kvio.root=/mnt/data`` is all it takes;
``KVIO_DLIO=posix-direct:///mnt/data`` in the environment does it too, for launchers that pass
nothing but workload options. See docs/dlio.md.

DLIO has no hook for a storage, so `kvio.connectors.dlio.wiring` claims ``storage_type:
parallel_fs``, which DLIO declares and does not implement. A run ends in an error unless every
rank wrote and read exactly the blocks that its workload says.
"""
