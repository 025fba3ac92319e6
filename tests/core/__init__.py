"""The core: stores, calls, buffers, damage, streams, without a particular backend."""
