"""Thin translations from other libraries' interfaces to a store, each imported by itself."""
