"""Comparisons of kvio with other software: ``python -m benchmarks NAME`` in a clone."""
