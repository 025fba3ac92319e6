"""Stub of tensorflow.compat.v1, in which DLIO sets the log level."""

from __future__ import annotations

from tensorflow.compat.v1 import logging

__all__ = ["logging"]
