"""Blocks as files: one backend under three names, which differ in the I/O mode they choose."""

from __future__ import annotations

from kvio.backends.posix.backend import Hybrid, PosixBackend, PosixDirect, PosixTmpfile
from kvio.backends.posix.options import PosixOptions

__all__ = ["Hybrid", "PosixBackend", "PosixDirect", "PosixOptions", "PosixTmpfile"]
