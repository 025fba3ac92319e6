"""Backends: what keeps the bytes. Loaded by name through the ``kvio.backends`` entry points."""
