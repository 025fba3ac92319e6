"""Stub of tensorflow.python.framework."""

errors = None
