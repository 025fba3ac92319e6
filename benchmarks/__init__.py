"""Benchmarks: the bars kvio is held to (bars.py) and single operations (pytest-benchmark)."""
