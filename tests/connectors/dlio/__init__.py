"""Tests of DLIO on kvio."""
