"""Policies around a store or a backend, one each."""
