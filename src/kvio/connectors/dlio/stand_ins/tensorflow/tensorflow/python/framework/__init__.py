"""Stands in for tensorflow.python.framework."""

errors = None
