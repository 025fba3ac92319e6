"""Scenario dlio: the deep-learning I/O benchmark DLIO 2.0.0 with kvio and with its own storage."""
