"""Stands in for tensorflow.python."""
