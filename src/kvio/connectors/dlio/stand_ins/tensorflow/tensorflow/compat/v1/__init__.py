"""Stands in for tensorflow.compat.v1: DLIO asks it to log less."""

from __future__ import annotations

from tensorflow.compat.v1 import logging

__all__ = ["logging"]
