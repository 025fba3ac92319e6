"""Stub of tensorflow.python."""
